//! Tests that wrong arguments end with status 2, failures with status 1, with a message on standard error.

use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::tar::TarBytes;

use crate::command::{dflop, refuse, text};
use crate::documents::commands;

const READERS: [&[&str]; 5] = [
    &["index"],
    &["list"],
    &["stream"],
    &["stats"],
    &["order", "--global-batch-size", "4", "--dp-size", "2"],
];

#[test]
fn every_command_explains_itself() {
    let commands = commands();
    assert!(commands.len() > 15, "the commands were found");
    for command in commands {
        let run = dflop(&[&command, "--help"]);
        assert_eq!((run.status, run.stderr.as_str()), (Some(0), ""), "{command}");
        assert!(run.stdout.contains("Usage: dflop"), "{command}");
    }
}

#[test]
fn changes_of_images_that_make_no_sense_are_misuse() {
    let data = TempDataset::new(1, 1, Compression::Plain);
    let stream = |args: &[&str], mentioned| {
        refuse(&[&["stream", &data.pattern()], args].concat(), 2, mentioned);
    };
    stream(&["--set", "augment.color_jitter=1,2,3"], "length 3");
    stream(&["--set", "augment.color_jitter=0,0,0,0.7"], "hue");
    stream(&["--decode", "raw", "--set", "augment.flip=0.5"], "augment");
    stream(&["--set", "read.scaled_decode=true"], "scaled_decode");
    stream(&["--set", "read.fields=jpg,"], "fields");
    stream(&["--set", "augment.crop=0.1,1,2"], "two or four numbers, found 3");
    stream(&["--set", "read.decode=raw"], "--decode raw");
    if !cfg!(feature = "turbojpeg") {
        stream(&["--decode", "rgb224", "--set", "read.scaled_decode=true"], "turbojpeg");
    }
}

#[test]
fn missing_shard_is_named() {
    for reader in READERS {
        refuse(&[reader, &["nowhere/x.tar"]].concat(), 1, "nowhere/x.tar");
    }
}

#[test]
fn directory_without_shards_is_misuse() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    for reader in READERS {
        refuse(&[reader, &[text(directory.path())]].concat(), 2, "dflop pack");
    }
}

#[test]
fn file_that_is_no_tar_fails() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let contents: [(&str, &[u8]); 2] = [("empty.tar", b""), ("text.tar", b"not an archive")];
    for (name, bytes) in contents {
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).expect("the directory can be written");
        for reader in READERS {
            refuse(&[reader, &[text(&path)]].concat(), 1, name);
        }
    }
}

#[test]
fn shard_without_samples_fails() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("x.tar");
    std::fs::write(&path, TarBytes::new().file("README", b"hi").finish())
        .expect("the directory can be written");
    for reader in READERS {
        refuse(&[reader, &[text(&path)]].concat(), 1, "sample");
    }
}

#[test]
fn impossible_stream_settings_are_misuse() {
    let data = TempDataset::new(1, 2, Compression::Plain);
    let stream = |option: &str, value: &str, mentioned: &str| {
        refuse(&["stream", &data.pattern(), option, value], 2, mentioned);
    };
    stream("--set", "read.workers=0", "workers");
    stream("--batch", "0", "batch");
    stream("--epochs", "0", "epochs");
    stream("--set", "read.error_budget=1.5", "between 0 and 1");
    stream("--set", "read.error_budget=nan", "between 0 and 1");
    stream("--decode", "nonsense", "rgb224");
}

#[test]
fn absurd_counts_are_misuse_and_not_a_crash() {
    let data = TempDataset::new(1, 2, Compression::Plain);
    let most = "18446744073709551615";
    refuse(&["stream", &data.pattern(), "--set", &format!("read.workers={most}")], 2, "workers");
    refuse(&["stream", &data.pattern(), "--batch", most], 2, "batch_size");
    refuse(&["stream", &data.pattern(), "--samples", "0"], 2, "at least 1");
    let plan = ["order", &data.pattern(), "--global-batch-size", "2", "--dp-size", "1"];
    refuse(&[&plan[..], &["--from-step", most, "--steps", "1"]].concat(), 2, "overflow");
    refuse(&[&plan[..], &["--set", &format!("order.first_epoch={most}")]].concat(), 2, "first_epoch");
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let data = TempDataset::new(1, 2, Compression::Plain);
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    for command in ["index", "list", "stats", "stream"] {
        for more in [&[][..], &["--json"]] {
            let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_dflop"));
            let status = program.args([command, &data.pattern()]).args(more).stdout(full()).output().unwrap();
            assert_eq!(status.status.code(), Some(1), "{command} {more:?}");
        }
    }
}

#[test]
fn impossible_plans_are_misuse() {
    let data = TempDataset::new(1, 8, Compression::Plain);
    let plan = |changed: &[&str], mentioned: &str| {
        for command in ["order", "simulate"] {
            refuse(&[&[command, &data.pattern()], changed].concat(), 2, mentioned);
        }
    };
    plan(&["--global-batch-size", "0", "--dp-size", "2"], "global_batch");
    plan(&["--global-batch-size", "4", "--dp-size", "0"], "at least 1");
    plan(&["--global-batch-size", "4", "--dp-size", "2", "--microbatches", "0"], "at least 1");
    plan(&["--global-batch-size", "3", "--dp-size", "2", "--microbatches", "2"], "cannot fill 4");
    plan(&["--global-batch-size", "4", "--dp-size", "2", "--set", "plan.stages=1"], "vision, audio, llm");
    plan(&["--global-batch-size", "4", "--dp-size", "2", "--set", "plan.stages=1,0,1"], "1 to 1024");
    plan(&["--global-batch-size", "4", "--dp-size", "2", "--model", "nonsense"], "omni-7b");
    plan(&["--global-batch-size", "4", "--dp-size", "2", "--device", "nonsense"], "h100");
    let strategy = ["--global-batch-size", "4", "--dp-size", "2", "--set", "plan.strategy=nonsense"];
    refuse(&[&["order", &data.pattern()], &strategy[..]].concat(), 2, "multi_lpt");
    plan(&["--global-batch-size", "4", "--dp-size", "2", "--set", "plan.stages=1,1,100000"], "1 to 1024");
    plan(&["--global-batch-size", "18446744073709551615", "--dp-size", "2"], "more than");
    plan(&["--global-batch-size", "4", "--dp-size", "2", "--set", "order.tail=nonsense"], "carry");
    plan(
        &["--global-batch-size", "9", "--dp-size", "2", "--set", "order.tail=drop"],
        "more than the 8 samples",
    );
    plan(&["--global-batch-size", "4", "--dp-size", "2", "--seed", "18446744073709551616"], "seed");
    plan(&["--global-batch-size", "4"], "dp-size");
}

#[test]
fn settings_without_effect_beside_others_are_refused() {
    let data = TempDataset::new(1, 8, Compression::Plain);
    let pattern = data.pattern();
    let refused = |command: &[&str], settings: &[&str], reason: &str| {
        let mut args = [command, &[pattern.as_str()]].concat();
        args.extend(settings.iter().flat_map(|pair| ["--set", *pair]));
        refuse(&args, 2, &format!("`--set {}` has no effect {reason}", settings[settings.len() - 1]));
    };
    let size = ["--global-batch-size", "4", "--dp-size", "2"];
    for command in ["order", "simulate"] {
        let command = [&[command], &size[..]].concat();
        refused(
            &command,
            &["processor.layout=padded"],
            "on plans without `processor.length_buckets=fixed:N`",
        );
        refused(
            &command,
            &["processor.length_buckets=64"],
            "on plans without `processor.length_buckets=fixed:N`",
        );
        refused(&command, &["plan.stages=1,1,1", "plan.schedule=microbatch"], "with `plan.stages`");
    }
    let order = [&["order"], &size[..]].concat();
    refuse(&[&order[..], &[&pattern, "--set", "plan.strategy=lpt:5"]].concat(), 2, "spends no work units");
    let simulate = [&["simulate"], &size[..]].concat();
    refused(&simulate, &["plan.strategy=lpt"], "on a comparison of strategies");
    let quality = [&["order", "--shuffle-quality"], &size[..]].concat();
    for setting in ["plan.strategy=search:5", "cost.recompute=layers", "processor.length_buckets=fixed:64"] {
        refused(&quality, &[setting], "with `--shuffle-quality`");
    }
    let batches = [&["batches", "--tokenizer", "nowhere"], &size[..]].concat();
    refused(&batches, &["processor.long_sample=drop"], "without a number of tokens");
    let counted = ["processor.dtype=none", "processor.media_buckets=64"];
    refused(&batches, &counted, "with `processor.dtype=none`");
    refused(&["stream", "--decode", "raw"], &["read.decode=strict"], "with `--decode raw`");
    refused(&["stream", "--decode", "rgb224"], &["index.videos=fps:2:4"], "without `--decode media`");
    refused(&["stream"], &["index.directory=here"], "without `order` settings");
    let stream = ["stream", &pattern, "--set"];
    let drawn = [&stream[..], &["order.shuffle=none"]].concat();
    refuse(&[&drawn[..], &["--shuffle-shards"]].concat(), 2, "`--shuffle-shards` has no effect with `order`");
    refuse(&[&drawn[..], &["--shuffle-buffer", "8"]].concat(), 2, "`--shuffle-buffer` has no effect with");
    refuse(&[&stream[..], &["order.accept_changed_data=true"]].concat(), 2, "needs `--resume`");
}

#[test]
fn cap_below_one_sample_fails_with_the_sample_that_exceeds_it() {
    let data = TempDataset::new(1, 8, Compression::Plain);
    let order = ["order", &data.pattern(), "--global-batch-size", "4", "--dp-size", "2"];
    refuse(&[&order[..], &["--set", "plan.tokens_max=1"]].concat(), 1, "above the cap of 1");
    refuse(&[&order[..], &["--set", "plan.bytes_max=1"]].concat(), 1, "above the cap of 1");
}

#[test]
fn malformed_instances_are_refused() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("x.json");
    let instances = [
        ("{}", 1, "missing field"),
        (r#"{"name":"x","n":2,"m":0,"c":1,"d":[[1],[2]]}"#, 2, "groups"),
        (r#"{"name":"x","n":2,"m":3,"c":1,"d":[[1],[2]]}"#, 1, "cannot fill 3"),
        (r#"{"name":"x","n":3,"m":1,"c":1,"d":[[1],[2]]}"#, 1, "expected 3"),
        (r#"{"name":"x","n":2,"m":1,"c":2,"d":[[1],[2]]}"#, 1, "expected 2"),
        (r#"{"name":"x","n":2,"m":1,"c":1,"d":[[-1],[2]]}"#, 1, "negative"),
        (
            r#"{"name":"x","n":2,"m":1,"c":1,"d":[[1],[2.5]]}"#,
            1,
            "`d` of item 1 must be an integer below 2^63, got 2.5",
        ),
        (r#"{"name":"x","n":2,"m":1,"c":1,"d":[[9223372036854775807],[2]]}"#, 1, "overflows at item 1"),
        ("\u{1f}no gzip either", 1, "instance"),
    ];
    for (instance, status, mentioned) in instances {
        std::fs::write(&path, instance).expect("the directory can be written");
        refuse(&["balance", "--instance", text(&path)], status, mentioned);
    }
    refuse(&["balance", "--instance", "nowhere.json"], 1, "nowhere.json");
}

#[test]
fn caps_that_cannot_be_kept_name_the_file_and_the_item() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("x.json");
    let balance = ["balance", "--instance", text(&path)];
    std::fs::write(&path, r#"{"n":2,"m":2,"c":1,"d":[[1],[2]]}"#).expect("the directory can be written");
    refuse(
        &[&balance[..], &["--tokens-max", "8"]].concat(),
        2,
        "x.json`: invalid `tokens_max`: the instance has no tokens",
    );
    refuse(
        &[&balance[..], &["--bytes-max", "8"]].concat(),
        2,
        "x.json`: invalid `bytes_max`: the instance has no bytes",
    );
    std::fs::write(&path, r#"{"n":2,"m":2,"c":1,"d":[[1],[2]],"tok":[5,9]}"#)
        .expect("the directory can be written");
    refuse(&[&balance[..], &["--tokens-max", "8"]].concat(), 1, "x.json`: item 1 alone has 9 tokens");
}

#[test]
fn a_limit_of_work_without_a_search_is_refused() {
    for flag in ["--search-effort", "--deadline-ms"] {
        let balance = ["balance", "--instance", "nowhere.json", "--strategy", "lpt", flag, "5"];
        refuse(&balance, 2, &format!("`{flag}` has no effect with `--strategy lpt`"));
    }
}

#[test]
fn exact_refuses_what_it_could_not_finish() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("x.json");
    let instance = format!(r#"{{"n":500,"m":50,"c":1,"d":[[1]{}]}}"#, ",[2]".repeat(499));
    std::fs::write(&path, instance).expect("the directory can be written");
    refuse(&["balance", "--instance", text(&path), "--strategy", "exact"], 1, "500 items in 50 groups");
}

#[test]
fn pipeline_objective_needs_ranks_that_divide_the_groups_and_a_stage_for_each_module() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("x.json");
    let instance = r#"{"name":"x","n":4,"m":4,"c":2,"d":[[1,2],[2,1],[3,3],[1,1]]}"#;
    std::fs::write(&path, instance).expect("the directory can be written");
    let pipeline = ["balance", "--instance", text(&path), "--objective", "pipeline"];
    refuse(&pipeline, 2, "--dp");
    refuse(&[&pipeline[..], &["--dp", "3", "--stages", "1,1"]].concat(), 2, "must divide");
    refuse(&[&pipeline[..], &["--dp", "2", "--stages", "1"]].concat(), 2, "2 numbers");
    refuse(&[&pipeline[..], &["--dp", "2", "--stages", "0,1"]].concat(), 2, "at least 1");
    let whole = [&pipeline[..], &["--dp", "2", "--stages", "1,1"]].concat();
    refuse(&[&whole[..], &["--encoder-dp", "1,2"]].concat(), 2, "encoder");
    refuse(&[&whole[..], &["--encoder-dp", "0"]].concat(), 2, "at least 1");
    refuse(&["balance", "--instance", text(&path), "--encoder-dp", "2"], 2, "--objective pipeline");
    refuse(&["balance", "--instance", text(&path), "--objective", "min-max"], 2, "--dp");
}

#[test]
fn nothing_to_pack_fails() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (source, out) = (directory.path().join("source"), directory.path().join("out"));
    refuse(&["pack", text(&source), text(&out)], 1, "source");
    std::fs::create_dir(&source).expect("the directory can be written");
    refuse(&["pack", text(&source), text(&out)], 1, "no samples");
    std::fs::write(source.join("a.txt"), "a").expect("the directory can be written");
    refuse(&["pack", text(&source), text(&out), "--shard-bytes", "0"], 2, "shard_bytes");
}

#[test]
fn unknown_schemes_are_refused_by_name() {
    for url in ["ftp://host/x.tar", "hdfs://host/x.tar"] {
        refuse(&["list", url], 2, "not supported");
    }
}
