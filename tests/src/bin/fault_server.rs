//! Serves a directory over HTTP, or proxies a second server, with latency but without faults.
//!
//! Runs until standard input ends. It is a separate process so that the server CPU time is not counted with
//! the measured process. Prints the address.
#![expect(clippy::print_stdout, reason = "the address is what the caller waits for")]

use std::io::Read;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use dflop_tests::fault_server::{Behavior, FaultServer};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [directory, latency_ms] = arguments.as_slice() else { return usage() };
    let Ok(latency_ms) = latency_ms.parse() else { return usage() };
    let behavior = Behavior { latency: Duration::from_millis(latency_ms), ..Behavior::default() };
    let server = match directory.parse() {
        Ok(upstream) => FaultServer::proxy(upstream, behavior, 0),
        Err(_) => FaultServer::serve_directory(Path::new(directory), behavior),
    };
    println!("{}", server.url(""));
    // The end of the input, or any error, ends the server.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    ExitCode::SUCCESS
}

#[expect(clippy::print_stderr, reason = "a program says on stderr why it failed")]
fn usage() -> ExitCode {
    eprintln!("usage: fault_server DIRECTORY|HOST:PORT LATENCY_MS");
    ExitCode::from(2)
}
