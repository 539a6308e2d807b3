//! Tests that ranks with different settings or files end with the same words, before the first step.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use super::config::Job;
use crate::command::Run;

/// A port that nobody listens on.
fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

fn start(mut command: Command, rank: &str, port: &str) -> Child {
    let environment = [
        ("RANK", rank),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", rank),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("DFLOP_PORT", port),
        ("DFLOP_JOB_TOKEN", "a secret of these tests"),
    ];
    command.envs(environment).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the command starts")
}

/// Runs two ranks by separate configurations.
fn ranks(jobs: [(&Job, &[&str]); 2]) -> [Run; 2] {
    let port = free_port();
    let started = [0, 1].map(|rank| start(jobs[rank].0.command(jobs[rank].1), ["0", "1"][rank], &port));
    started.map(|rank| rank.wait_with_output().expect("the command ends").into())
}

#[test]
fn the_first_setting_that_differs_is_named_on_all_ranks() {
    let job = Job::new();
    let no_args: &[&str] = &[];
    for (replaced, args, words) in [
        (
            &[("learning_rate = 2e-3", "learning_rate = 3e-3")][..],
            no_args,
            "ranks disagree on `optimizer.learning_rate`: rank 0 has 0.002, rank 1 has 0.003",
        ),
        (
            &[
                ("global_batch_size = 8", "global_batch_size = 16"),
                ("search_effort = 500", "search_effort = 600"),
            ],
            no_args,
            "ranks disagree on `data.global_batch_size`: rank 0 has 8, rank 1 has 16; they differ as well in \
             `parallel.search_effort`",
        ),
        (&[("rope_theta = 10000.0", "rope_theta = 20000.0")], no_args, "ranks disagree on `config.json`"),
        (&[], &["--steps", "3"], "ranks disagree on `--steps`: rank 0 has none, rank 1 has 3"),
    ] {
        let other = Job::with(replaced);
        let [first, second] = ranks([(&job, no_args), (&other, args)]);
        let said = format!("{}{}", first.stderr, second.stderr);
        for run in [first, second] {
            assert_eq!((run.status, run.stdout.as_str()), (Some(1), ""), "{said}");
            assert!(run.stderr.contains(words), "{said}");
        }
    }
}

#[test]
fn ranks_may_differ_in_what_belongs_to_their_machines() {
    let job = Job::new();
    let other = Job::with(&[("search_effort = 500", "search_effort = 500\nthreads = 2\nmemory_gib = 3.0")]);
    let [first, second] = ranks([(&job, &["--steps", "1"]), (&other, &["--steps", "1"])]);
    assert_eq!((first.status, second.status), (Some(0), Some(0)), "{}{}", first.stderr, second.stderr);
    assert_eq!(first.stdout.lines().count(), 1, "{}", first.stdout);
}
