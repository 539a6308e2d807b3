//! Tests links and pipes that somebody put into a directory of checkpoints, as an archive may.

use std::os::unix::fs::symlink;
use std::path::Path;

use super::config::{Job, loss_bits};
use crate::command::text;

#[test]
fn nothing_is_written_through_a_link_and_no_pipe_is_waited_for() {
    let enabled = "[checkpoint]\nevery = 1\n\n[correction]\nenabled = true";
    let job = Job::with(&[("[correction]\nenabled = false", enabled)]);
    let states = job.path("states");
    let args = ["--checkpoints", text(&states)];
    let straight = job.lines(&["--steps", "3"]);
    job.lines(&[&args[..], &["--steps", "2"]].concat());
    let victim = job.path("victim.txt");
    let plant_link = |path: &Path| {
        let _ = std::fs::remove_file(path);
        symlink(&victim, path).expect("the link is made");
    };
    let plant_pipe = |path: &Path| {
        let _ = std::fs::remove_file(path);
        let made = std::process::Command::new("mkfifo").arg(path).status().expect("mkfifo starts");
        assert!(made.success());
    };
    let plants: [&dyn Fn(&Path); 2] = [&plant_link, &plant_pipe];
    for (plant, kind) in plants.into_iter().zip(["a symbolic link", "a pipe"]) {
        for name in [".owner", "steps.jsonl", "corrections.jsonl", ".set-aside"] {
            std::fs::write(&victim, "precious\n").expect("the file is written");
            let path = states.join(name);
            let kept = std::fs::read(&path).ok();
            plant(&path);
            let run = job.run(&[&args[..], &["--resume", "--steps", "3"]].concat());
            assert_eq!(run.status, Some(1), "{kind} at {name}: {run:?}");
            assert!(run.stderr.contains(name), "{kind} at {name}: {}", run.stderr);
            let is_damage = kind == "a symbolic link" && name == ".set-aside";
            assert!(run.stderr.contains(if is_damage { "damaged" } else { kind }), "{name}: {}", run.stderr);
            assert_eq!(std::fs::read_to_string(&victim).expect("it is there"), "precious\n");
            std::fs::remove_file(&path).expect("it can be removed");
            kept.map(|bytes| std::fs::write(&path, bytes)).transpose().expect("it is written");
        }
    }
    // A state or manifest that is a pipe makes the checkpoint unusable, and the previous checkpoint is used.
    plant_pipe(&states.join("step-00000002/manifest.json"));
    let run = job.run(&[&args[..], &["--resume", "--steps", "3"]].concat());
    assert_eq!(run.status, Some(0), "{run:?}");
    assert!(run.stderr.contains("`manifest.json` cannot be read"), "{}", run.stderr);
    let rest = run.objects();
    assert_eq!(loss_bits(&rest), loss_bits(&straight)[1..]);
}

#[test]
fn weights_that_the_manifest_does_not_list_are_named_and_not_resumed_from() {
    let job = Job::with(&[("[correction]", "[checkpoint]\nevery = 1\n\n[correction]")]);
    let states = job.path("states");
    let args = ["--checkpoints", text(&states)];
    let straight = job.lines(&["--steps", "3"]);
    job.lines(&[&args[..], &["--steps", "2"]].concat());
    let newest = states.join("step-00000002");
    let weights = std::fs::read_dir(&newest).expect("a checkpoint").flatten().map(|entry| entry.path());
    let weights = weights.filter(|path| text(path).contains("/model-")).max().expect("two files of weights");
    std::fs::copy(weights, newest.join("model.safetensors")).expect("the file is copied");
    let run = job.run(&[&args[..], &["--resume", "--steps", "3"]].concat());
    assert_eq!(run.status, Some(0), "{run:?}");
    assert!(run.stderr.contains("`model.safetensors` is not in its manifest"), "{}", run.stderr);
    assert_eq!(loss_bits(&run.objects()), loss_bits(&straight)[1..], "from the checkpoint before");
}
