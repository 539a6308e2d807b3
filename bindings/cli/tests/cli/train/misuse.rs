//! Tests files and arguments that cannot be run, and runs that cannot continue.

use super::config::Job;
use crate::command::text;

/// The message from a run that must end with a status.
fn message(job: &Job, args: &[&str], status: i32) -> String {
    let run = job.run(args);
    assert_eq!(run.status, Some(status), "{args:?}: {}", run.stderr);
    assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
    assert_eq!(run.stdout, "", "{args:?}");
    run.stderr
}

/// The error for a changed configuration must have these words.
fn refused(replaced: (&str, &str), status: i32, words: &[&str]) {
    let message = message(&Job::with(&[replaced]), &[], status);
    assert!(words.iter().all(|word| message.contains(word)), "{replaced:?}: {message}");
}

#[test]
fn a_field_that_is_not_known_is_shown_with_its_line() {
    refused(
        ("global_batch_size = 8", "global_batch_size = 8\nglobal_bach_size = 9"),
        2,
        &["train.toml", "global_bach", "line "],
    );
    refused(("steps = 6", "steps = \"six\""), 2, &["train.toml", "line 2", "steps = \"six\""]);
    refused(("[data]", "[data"), 2, &["train.toml", "line "]);
}

#[test]
fn models_that_are_missing_or_wrong_are_named() {
    refused(("model_type = \"internvl\"\n", "model_type = \"intervl\"\n"), 2, &["intervl"]);
    refused(
        (
            "hidden_size = 16\nintermediate_size = 24\nnum_hidden_layers = 3",
            "hidden_size = 15\nintermediate_size = 24\nnum_hidden_layers = 3",
        ),
        2,
        &["hidden_size"],
    );
    let job = Job::new();
    std::fs::write(job.path("train.toml"), "[model]\ndirectory = \"nowhere\"\n[data]\ngenerate = {}\n")
        .unwrap();
    assert!(message(&job, &[], 1).contains("nowhere"));
    std::fs::write(job.path("train.toml"), "[model]\n[data]\ngenerate = {}\n").unwrap();
    assert!(message(&job, &[], 2).contains("`model` needs either `directory` or `config`"));
    std::fs::remove_file(job.path("train.toml")).unwrap();
    assert!(message(&job, &[], 1).contains("train.toml"));
}

#[test]
fn layouts_that_do_not_fit_are_refused() {
    let llm = "llm = { stages = 1, dp = 1 }";
    refused((llm, "llm = { layers = [1, 1] }"), 2, &["[1, 1]", "3", "Llm"]);
    refused((llm, "llm = { layers = [0, 3] }"), 2, &["[0, 3]"]);
    refused((llm, "llm = { stages = 4 }"), 2, &["4 stages for 3 layers"]);
    refused((llm, "llm = { stages = 0 }"), 2, &["0 stages"]);
    refused((llm, "llm = { dp = 0 }"), 2, &["dp"]);
    refused((llm, "llm = { tp = 3 }"), 2, &["tensor-parallel degree 3"]);
    refused((llm, "llm = { stages = 2 }\nschedule = \"zb\""), 2, &["schedule"]);
    let job = Job::new();
    assert!(message(&job, &["--stages", "9"], 2).contains("8 stages for 3 layers"));
    assert!(message(&job, &["--stages", "0"], 2).contains("`stages` 0"));
    assert!(message(&job, &["--local-ranks", "3"], 2).contains("expected 2, the ranks of the job"));
}

#[test]
fn modules_that_cannot_share_ranks_are_refused() {
    let llm = "llm = { stages = 1, dp = 1 }";
    let joint = |tables: &str| format!("placement = \"joint\"\n{tables}");
    refused(
        (llm, &joint("vision = { layers = [0, 1] }\nllm = { stages = 2 }")),
        2,
        &["Vision ends in stage 1"],
    );
    refused((llm, &joint("vision = { layers = [1] }\nllm = { stages = 2 }")), 2, &["1 entries, the LLM 2"]);
    refused((llm, &joint("vision = { dp = 2 }")), 2, &["Vision has DP 2 and TP 1, expected 1 and 1"]);
    refused((llm, &joint("schedule = \"interleaved:1\"")), 2, &["not for joint placement"]);
    refused(
        (llm, "placement = \"colocated\"\nllm = { dp = 2 }"),
        2,
        &["Vision takes 1 ranks, expected the LLM's 2"],
    );
    refused((llm, "placement = \"beside\""), 2, &["train.toml", "beside", "joint"]);
    let job = Job::new();
    let plan = job.path("plan.json");
    let with_plan = |contents: &str| {
        std::fs::write(&plan, contents).unwrap();
        message(&job, &["--plan", text(&plan)], 2)
    };
    assert!(with_plan("{").contains("plan.json`: is no plan of `dflop plan --json`"));
    assert!(with_plan("{\"modules\": []}").contains("missing field `microbatches`"));
    let layers = "\"tp\": 1, \"dp\": 1, \"layers\": [1], \"recompute\": false";
    let of = |modules: &str, is_run: bool| {
        format!(
            "{{\"modules\": [{modules}], \"microbatches\": 1, \"placement\": \"joint\", \"schedule\": \"1f1b\", \
             \"is_run\": {is_run}}}"
        )
    };
    let unknown = format!("{{\"name\": \"video\", {layers}}}");
    assert!(with_plan(&of(&unknown, true)).contains("the executor has no module `video`"));
    assert!(with_plan(&of(&unknown, false)).contains("planned and simulated only"));
    let shared = format!("{{\"name\": \"llm\", \"ep\": 4, {layers}}}");
    assert!(
        with_plan(&of(&shared, false))
            .contains("divides experts over 4 ranks, which is planned and simulated only")
    );
    assert!(message(&job, &["--plan", "nowhere.json"], 1).contains("nowhere.json"));
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    refused(("steps = 6", "steps = 0"), 2, &["steps"]);
    refused(("global_batch_size = 8", "global_batch_size = 0"), 2, &["global_batch"]);
    refused(("microbatches = 2", "microbatches = 0"), 2, &["microbatches"]);
    refused(("learning_rate = 2e-3", "learning_rate = -1.0"), 2, &["learning_rate"]);
    refused(("learning_rate = 2e-3", "learning_rate = nan"), 2, &["learning_rate"]);
    refused(("timeout_seconds = 20.0", "timeout_seconds = 0.0"), 2, &["timeout_seconds"]);
    refused(("tiles = [1, 5]", "tiles = [5, 1]"), 2, &["tiles"]);
    let threads = |threads| format!("invalid `parallel.threads`: expected 1 to 1024, found {threads}");
    refused(("search_effort = 500", "search_effort = 500\nthreads = 100000"), 2, &[&threads(100_000)]);
    refused(("search_effort = 500", "search_effort = 500\nthreads = 0"), 2, &[&threads(0)]);
    let workers = "invalid `read.workers`: expected 1 to 1024, found 100000";
    refused(("global_batch_size = 8", "global_batch_size = 8\n[read]\nworkers = 100000"), 2, &[workers]);
    let fields = "`read.fields` has no effect here: the model's processor reads the fields that it needs";
    refused(("global_batch_size = 8", "global_batch_size = 8\n[read]\nfields = \"images\""), 2, &[fields]);
    let split = "`data.split` has no effect here: a run with `data.shards` alone has it";
    refused(("global_batch_size = 8", "global_batch_size = 8\nsplit = \"train\""), 2, &[split]);
}

#[test]
fn models_too_large_for_any_machine_are_refused_before_memory_is_allocated() {
    let llm = "num_hidden_layers = 3";
    refused((llm, "num_hidden_layers = 4000000000"), 2, &["config.json", "parameters take", "2 machines"]);
    let vision = "num_hidden_layers = 1";
    refused((vision, "num_hidden_layers = 4000000000"), 2, &["config.json", "parameters take"]);
    // small enough for the memory, but every layer costs more than its parameters
    let layers = "expected at most 10000, found 100000";
    refused((llm, "num_hidden_layers = 100000"), 2, &["config.json", layers, "LLM"]);
    refused((vision, "num_hidden_layers = 100000"), 2, &["config.json", layers, "vision encoder"]);
    refused(("vocab_size = 80", "vocab_size = 4000000000"), 2, &["config.json", "parameters take"]);
}

#[test]
fn resuming_without_a_directory_is_refused_and_from_an_empty_one_begins_anew() {
    let job = Job::new();
    assert!(message(&job, &["--resume"], 2).contains("--checkpoints DIR"));
    let states = job.path("none");
    assert_eq!(job.lines(&["--steps", "1", "--resume", "--checkpoints", text(&states)])[0]["step"], 0);
    // A state with a different seed belongs to a different run.
    let args = ["--steps", "2", "--resume", "--checkpoints", text(&states), "--seed", "5"];
    assert!(message(&job, &args, 1).contains("seed 0"));
}

#[test]
fn directories_that_cannot_be_written_are_named_with_the_rank_to_blame() {
    let job = Job::new();
    std::fs::write(job.path("file"), "").unwrap();
    let states = message(&job, &["--checkpoints", text(&job.path("file/states"))], 1);
    assert!(states.contains("file/states") && states.contains("rank 0 ended the run"), "{states}");
    assert!(message(&job, &["--trace", text(&job.path("file/trace"))], 1).contains("file/.trace."));
}

#[test]
fn shards_that_cannot_be_read_are_named() {
    let job = Job::new();
    job.lines(&["--steps", "1"]);
    let model = job.generated().join("model");
    let toml = |shards: &str| {
        let toml = format!(
            "steps = 2\n[model]\ndirectory = \"{}\"\n[data]\nshards = [\"{shards}\"]\nglobal_batch_size = 8\n[parallel]\nmicrobatches = 2\n",
            model.display()
        );
        std::fs::write(job.path("train.toml"), toml).unwrap();
    };
    toml("nothing-{000..001}.tar");
    assert!(message(&job, &[], 1).contains("nothing-000.tar"));
    std::fs::write(job.path("broken.tar"), [7; 2048]).unwrap();
    toml("broken.tar");
    assert!(message(&job, &[], 1).contains("broken.tar"));
    toml("");
    assert_ne!(job.run(&[]).status, Some(0));
}

#[test]
fn a_run_that_diverges_ends_with_its_step() {
    for stages in ["1", "2", "4"] {
        let job = Job::with(&[("learning_rate = 2e-3", "learning_rate = 1e30")]);
        let run = job.run(&["--stages", stages]);
        assert_eq!(run.status, Some(1), "{}", run.stderr);
        assert!(run.stderr.contains("step 1: ") && run.stderr.contains("the loss is"), "{}", run.stderr);
        assert!(run.objects().iter().all(|line| line["loss"].is_f64()), "{}", run.stdout);
        assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
    }
}

#[test]
fn a_limit_of_memory_holds_in_either_precision() {
    for precision in ["f32", "bf16"] {
        let limited = format!("learning_rate = 2e-3\nprecision = \"{precision}\"");
        let job = Job::with(&[
            ("search_effort = 500", "search_effort = 500\nmemory_gib = 0.00001"),
            ("learning_rate = 2e-3", &limited),
        ]);
        let message = message(&job, &[], 1);
        assert!(message.contains("out of memory"), "{precision}: {message}");
    }
}
