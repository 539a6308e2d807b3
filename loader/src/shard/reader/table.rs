//! Reads tables: local ones, and remote ones by ranged requests.

use super::{Reader, ReceiverDropped};
use crate::error::Result;
use crate::shard::list::Shard;
use crate::shard::order::{HEADER_BYTES, ShardIdentity, ShardPass};
use crate::shard::table::{OpenTable, TableFault, TableItems};
use crate::store::{Identity, RemoteObject, spawn};
use bytes::Bytes;
use std::io;

impl Reader {
    /// Reads the wanted rows of a table.
    pub(super) fn read_table(
        &self,
        shard: &Shard,
        pass: &ShardPass,
        opened: Result<OpenTable, TableFault>,
    ) -> Result<Result<()>, ReceiverDropped> {
        let table = match opened {
            Ok(table) => table,
            Err(TableFault::Read(source)) => return Ok(Err(shard.read_error(source))),
            Err(TableFault::Damaged(reason)) => {
                self.runtime.block_on(self.skip_shard(shard, pass, reason))?;
                return Ok(Ok(()));
            }
        };
        let (fields, field_bytes_max) = (self.config.fields.clone(), self.config.field_bytes_max);
        let rows = 0..table.rows();
        let items = TableItems::new(table, rows, fields, field_bytes_max, |row| pass.next_wanted(row));
        for item in items {
            let (number, item) = match item {
                Ok(item) => item,
                Err(source) => return Ok(Err(shard.read_error(source))),
            };
            if let Err(item) = self.deliver_now(item, pass, number) {
                self.runtime.block_on(self.deliver_later(item, pass, number))?;
            }
        }
        Ok(Ok(()))
    }

    /// Reads the wanted rows of a remote table.
    pub(super) fn read_remote_table(
        &self,
        pass: &ShardPass,
        object: &RemoteObject,
    ) -> Result<Result<()>, ReceiverDropped> {
        let shard = &self.config.shards[pass.shard];
        self.config.metrics.reads_shard(pass.shard);
        self.pause_work();
        self.resume_work();
        let object = object.clone().counted_by(self.config.metrics.retries());
        let (identity, first) = match start(object.clone()) {
            Ok(started) => started,
            Err(source) => return Ok(Err(shard.read_error(source))),
        };
        let found = ShardIdentity::from_header(identity.bytes, &first);
        if let Err(changed) = self.config.known.check_identity(pass.shard, shard, found) {
            return Ok(Err(changed));
        }
        self.read_table(shard, pass, OpenTable::remote(shard, object, identity))
    }
}

/// Requests the version and the first bytes of an object.
///
/// # Errors
/// The store error after all attempts.
fn start(object: RemoteObject) -> io::Result<(Identity, Bytes)> {
    let started = spawn(async move {
        let identity = object.identity().await?;
        let first = object.read(0..identity.bytes.min(HEADER_BYTES as u64), &identity).await?.0;
        Ok((identity, first))
    });
    started.wait()?
}
