//! Tests rejections in builds without CUDA devices; `tests/cuda-stand-in/programs` tests builds with CUDA
//! devices.

#[cfg(not(feature = "cuda"))]
mod without {
    use crate::command::dflop;
    use crate::train::config::Job;

    #[test]
    fn a_build_without_cuda_devices_says_so() {
        let job = Job::with(&[("[parallel]\n", "[parallel]\ncompute_device = \"cuda\"\n")]);
        let run = job.run(&["--stages", "1"]);
        assert_eq!((run.status, run.stdout.as_str()), (Some(2), ""));
        assert!(run.stderr.contains("build with `--features cuda`"), "{}", run.stderr);
        let run = dflop(&["profile", "--model", "tiny", "--device", "cuda:0", "--out", "nowhere"]);
        assert_eq!((run.status, run.stdout.as_str()), (Some(2), ""));
        assert!(run.stderr.contains("build with `--features cuda`"), "{}", run.stderr);
        let check = job.run(&["--check"]);
        let finding = "this build has no CUDA devices; build with `--features cuda`";
        assert!(check.stdout.contains(&format!("\"GPUs\",\"finding\":\"{finding}\"")), "{}", check.stdout);
        assert_eq!(check.status, Some(1));
    }
}

#[test]
fn devices_that_are_not_known_are_refused() {
    use crate::command::dflop;
    use crate::train::config::Job;

    let job = Job::with(&[("[parallel]\n", "[parallel]\ncompute_device = \"gpu\"\n")]);
    let run = job.run(&[]);
    assert_eq!((run.status, run.stdout.as_str()), (Some(2), ""));
    assert!(run.stderr.contains("expected `cpu`, `cuda` or `cuda:N`, found `gpu`"), "{}", run.stderr);
    let job = Job::with(&[("[parallel]\n", "[parallel]\nattention = \"fastest\"\n")]);
    let run = job.run(&[]);
    assert_eq!((run.status, run.stdout.as_str()), (Some(2), ""));
    assert!(run.stderr.contains("`parallel.attention` needs a CUDA device"), "{}", run.stderr);
    let job = Job::with(&[("[parallel]\n", "[parallel]\ntransport = \"nccl\"\n")]);
    let run = job.run(&[]);
    assert_eq!((run.status, run.stdout.as_str()), (Some(2), ""));
    assert!(run.stderr.contains("`parallel.transport = \"nccl\"` needs CUDA devices"), "{}", run.stderr);
    let run = dflop(&["profile", "--model", "tiny", "--device", "cuda:x", "--out", "nowhere"]);
    assert_eq!(run.status, Some(2));
    assert!(run.stderr.contains("expected `cpu`, `cuda` or `cuda:N`, found `cuda:x`"), "{}", run.stderr);
}
