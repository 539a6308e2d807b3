//! Serves a directory over HTTP, or stands in front of another server, late but without faults, until its standard input
//! ends: a server whose CPU time is not that of the process it is measured with. Prints its address.
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
        Ok(upstream) => FaultServer::in_front_of(upstream, behavior, 0),
        Err(_) => FaultServer::of_directory(Path::new(directory), behavior),
    };
    println!("{}", server.url(""));
    // Whatever ends the input ends the server.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    ExitCode::SUCCESS
}

#[expect(clippy::print_stderr, reason = "a program says on stderr why it failed")]
fn usage() -> ExitCode {
    eprintln!("usage: fault_server DIRECTORY|HOST:PORT LATENCY_MS");
    ExitCode::from(2)
}
