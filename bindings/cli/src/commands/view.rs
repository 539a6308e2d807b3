//! `dflop view`: serves a page to look at dataset samples.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use dflop_executor::comm::launch::StopSignals;
use serde::Serialize;

use crate::args::dataset::IndexedArgs;
use crate::args::model::{ModelArgs, TokenizerArgs};
use crate::args::set::{SetArgs, accepted};
use crate::failure::Failure;
use crate::output::{Output, runtime, write_json};
use crate::view::{Server, View};

/// Time between looks for a signal.
const POLL: Duration = Duration::from_millis(50);

/// Look at the samples of a dataset in a browser: a page on this machine, until Ctrl-C.
///
/// Prints the page address, which contains a random token: anyone who has it can read the dataset. Samples
/// are sorted and filtered by predicted cost and shape; images, audio, conversations and skip reasons are
/// shown. Starts no browser.
#[derive(Debug, Args)]
pub(crate) struct ViewArgs {
    #[command(flatten)]
    dataset: IndexedArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    #[command(flatten)]
    set: SetArgs<ViewAccepted>,
    /// Port on 127.0.0.1; 0 selects a free port.
    #[arg(long, value_name = "N", default_value_t = 0)]
    port: u16,
    /// Print the address as a JSON object.
    #[arg(long)]
    json: bool,
}

accepted!(ViewAccepted: "cost", "processor.chat_template", "processor.caption_prompt", "index", "store");

#[derive(Debug, Serialize)]
struct Serving<'a> {
    /// Page address with the token.
    url: &'a str,
    samples: u64,
    /// Number of samples and shards that are bad by their headers.
    skipped: usize,
}

pub(crate) fn run(args: &ViewArgs, out: &mut Output) -> Result<(), Failure> {
    let settings = args.set.settings()?;
    let model = args.model.cost_model(&settings)?;
    let token_counts = args.tokenizer.token_counts(Some(model.spec()), &settings)?;
    let dataset = args.dataset.open(&settings, token_counts)?;
    let (samples, skipped) = (dataset.len(), dataset.skipped().len());
    let costs = format!("{} on {}", args.model.name(), args.model.times_from(&settings));
    let view = Arc::new(View::new(dataset, model, costs)?);
    let signals = StopSignals::register().map_err(dflop_executor::Error::from)?;
    let runtime = runtime()?;
    let served: Result<(), Failure> = runtime.block_on(async {
        let server = Server::bind(args.port).await?;
        let url = server.url();
        if args.json {
            write_json(out, &Serving { url: &url, samples, skipped })?;
        } else {
            writeln!(out, "{samples} samples at {url} until Ctrl-C")?;
        }
        out.flush()?;
        let stopped = async {
            while signals.received().is_none() {
                tokio::time::sleep(POLL).await;
            }
        };
        server.run(view, stopped).await;
        Ok(())
    });
    // A request may still read or decode; do not wait for it.
    runtime.shutdown_background();
    served
}
