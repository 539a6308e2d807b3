//! Reads shards as streams: compressed shards, pipes, standard input, and remote shard bodies.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncBufRead, AsyncReadExt};
use tokio::process::Child;

use super::{Reader, ReceiverDropped};
use crate::error::{Result, Skipped};
use crate::shard::compression::{decompress, sniff_compression};
use crate::shard::list::Shard;
use crate::shard::order::{HEADER_BYTES, ShardIdentity, ShardPass};
use crate::shard::samples::{ShardItem, StreamedSamples};
use crate::store::ShardBody;

/// Number of bytes needed to detect stream compression.
const SNIFFED_BYTES: usize = 6;
/// Maximum time for a command to exit after the end of its output.
const COMMAND_END: Duration = Duration::from_mins(1);

impl Reader {
    /// Reads a body; a body that ends too early ends the stream after the complete samples.
    pub(super) async fn read_body(
        &self,
        shard: &Shard,
        pass: &ShardPass,
        mut body: ShardBody,
    ) -> Result<Result<()>, ReceiverDropped> {
        let (failure, bytes) = (body.failure(), body.bytes());
        let reading = async {
            let mut header = Vec::with_capacity(HEADER_BYTES);
            if let Err(source) = (&mut body).take(HEADER_BYTES as u64).read_to_end(&mut header).await {
                return Ok(Err(shard.read_error(source)));
            }
            let identity = ShardIdentity::from_header(bytes, &header);
            if let Err(changed) = self.config.known.check_identity(pass.shard, shard, identity) {
                return Ok(Err(changed));
            }
            // The first block was read to identify the shard; it is still the start of the archive.
            let whole = std::io::Cursor::new(header).chain(body);
            self.read_input(shard, pass, whole, None).await
        };
        let read = tokio::select! {
            read = reading => read?,
            () = self.sender.closed() => return self.give_up(),
        };
        // The readers above only see that the bytes end early; the body has recorded the cause.
        let failed = failure.lock().expect("no holder panics").take();
        Ok(failed.map_or(read, |source| Err(shard.read_error(source))))
    }

    pub(super) async fn read_input(
        &self,
        shard: &Shard,
        pass: &ShardPass,
        mut input: impl AsyncBufRead + Send + Unpin,
        command: Option<Box<Child>>,
    ) -> Result<Result<()>, ReceiverDropped> {
        let mut first = Vec::with_capacity(SNIFFED_BYTES);
        let sniffed = (&mut input).take(SNIFFED_BYTES as u64).read_to_end(&mut first).await;
        if let Err(source) = sniffed {
            return Ok(Err(shard.read_error(source)));
        }
        match sniff_compression(&shard.url, &first) {
            Ok(compression) => {
                let whole = std::io::Cursor::new(first).chain(input);
                self.read_stream(shard, pass, decompress(compression, whole)).await?;
            }
            Err(unsupported) => self.skip_shard(shard, pass, unsupported.to_string()).await?,
        }
        match command {
            Some(command) => self.check_command(shard, command).await,
            None => Ok(Ok(())),
        }
    }

    pub(super) async fn read_stream<R>(
        &self,
        shard: &Shard,
        pass: &ShardPass,
        reader: R,
    ) -> Result<(), ReceiverDropped>
    where
        R: tokio::io::AsyncRead + Unpin,
    {
        let mut samples = StreamedSamples::new(shard.url.clone(), reader, self.config.field_bytes_max)
            .fields(self.config.fields.clone());
        let mut number = pass.first;
        while !pass.is_over(number)
            && let Some(item) = samples.next().await
        {
            if pass.wants(number) {
                self.deliver(item, pass, number).await?;
            } else {
                self.config.metrics.passed_over();
            }
            number += 1;
        }
        Ok(())
    }

    /// Checks the exit status: a failed command may have written only part of the shard.
    async fn check_command(
        &self,
        shard: &Shard,
        mut command: Box<Child>,
    ) -> Result<Result<()>, ReceiverDropped> {
        Ok(wait_for_exit(&mut command, COMMAND_END).await.map_err(|source| shard.read_error(source)))
    }

    pub(super) async fn skip_shard(
        &self,
        shard: &Shard,
        pass: &ShardPass,
        reason: String,
    ) -> Result<(), ReceiverDropped> {
        if !pass.wants(0) {
            return Ok(());
        }
        let shard = shard.url.to_string();
        let skipped = Skipped { shard, offset: 0, key: None, field: None, reason };
        self.deliver(ShardItem::Skipped(skipped), pass, 0).await
    }
}

/// Waits until a command exits after the output has ended; a command that stays is killed when it is dropped.
///
/// # Errors
/// If the command does not succeed: the exit status, or the process that is still running.
async fn wait_for_exit(command: &mut Child, patience: Duration) -> io::Result<()> {
    let process = command.id().unwrap_or_default();
    let status = tokio::time::timeout(patience, command.wait()).await.map_err(|_| {
        let waited = patience.as_secs_f64();
        let reason = format!(
            "the command, process {process}, has closed its output and is still running after {waited} s"
        );
        io::Error::new(io::ErrorKind::TimedOut, reason)
    })??;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("the command ended with {status}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_command_that_stays_after_its_output_is_named() {
        let run = |script: &str| {
            let mut command = tokio::process::Command::new("sh");
            command.args(["-c", script]).kill_on_drop(true).spawn().unwrap()
        };
        let mut stays = run("exec sleep 60");
        let process = stays.id().unwrap();
        let error = wait_for_exit(&mut stays, Duration::from_millis(50)).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains(&format!("process {process}")), "{error}");
        let failed = wait_for_exit(&mut run("exit 3"), COMMAND_END).await.unwrap_err();
        assert!(failed.to_string().contains("exit status: 3"), "{failed}");
        assert!(wait_for_exit(&mut run("exit 0"), COMMAND_END).await.is_ok());
    }
}
