//! Tests runs with data settings: mixtures, splits, prompts and templates, error budgets, long samples.

use serde_json::{Value, json};

use super::config::{Job, difference, loss_bits, losses};
use super::damaged::{break_image, shard};
use crate::command::text;

/// The table that generates a dataset, with everything in it.
const GENERATE: &str = "[data.generate]\nsamples = 64\nimage_fraction = 0.4\ntiles = [1, 5]\ntile_pixels = 16\n\
                        text_tokens_median = 10.0\ntext_tokens_max = 60\n";
const BATCH: &str = "global_batch_size = 8";
const LLM: &str = "llm = { stages = 1, dp = 1 }";

/// A job on shards that an earlier run of it has generated, with splits next to them.
pub(super) struct OnShards {
    pub(super) job: Job,
    pub(super) shards: String,
}

impl OnShards {
    pub(super) fn new() -> Self {
        let job = Job::new();
        job.lines(&["--steps", "1"]);
        let directory = job.generated().join("shards");
        let keys = |numbers: std::ops::Range<usize>| -> Vec<String> {
            numbers.map(|number| format!("sample-{number:06}")).collect()
        };
        let splits = json!({"splits": {
            "train": {"keys": keys(0..51)}, "held-out": {"keys": keys(51..64)},
            "eight": {"keys": keys(40..48), "may_overlap": true}, "same": {"keys": keys(40..48), "may_overlap": true},
        }});
        std::fs::write(directory.join("splits.json"), splits.to_string()).expect("it can be written");
        let shards = directory.display().to_string();
        Self { job, shards }
    }

    /// Writes the configuration again.
    ///
    /// - `data`: keys of the table `data`
    /// - `tables`: in place of the table that generates a dataset
    pub(super) fn rewrite(&self, data: &str, tables: &str, replaced: &[(&str, &str)]) {
        let tokenizer = self.job.generated().join("model");
        let data = format!("{BATCH}\ntokenizer = \"{}\"\n{data}", tokenizer.display());
        let own = [(BATCH, data.as_str()), (GENERATE, tables)];
        self.job.rewrite(&[&own[..], replaced].concat());
    }

    /// Key of the table `data` that names the shards.
    pub(super) fn named(&self) -> String {
        format!("shards = [\"{}\"]", self.shards)
    }
}

fn tokens(lines: &[Value]) -> Vec<u64> {
    lines.iter().map(|line| line["tokens"].as_u64().expect("tokens")).collect()
}

#[test]
fn a_mixture_trains_alike_on_any_ranks_and_resumes_with_the_same_bits() {
    let data = OnShards::new();
    let shards = &data.shards;
    let mixture = format!(
        "[data.mixture]\ndata_sets = [\n{{shards = [\"{shards}\"], weight = 0.75, split = \"train\"}},\n\
         {{shards = [\"{shards}\"], weight = 0.25, split = \"held-out\"}},\n]\n"
    );
    data.rewrite("", &mixture, &[]);
    let straight = data.job.lines(&["--steps", "6"]);
    assert!(straight.iter().all(|line| line["samples"] == 8), "{straight:?}");
    let states = data.job.path("states");
    let mut parts = data.job.lines(&["--steps", "3", "--checkpoints", text(&states)]);
    parts.extend(data.job.lines(&["--steps", "6", "--checkpoints", text(&states), "--resume"]));
    assert_eq!(loss_bits(&parts), loss_bits(&straight));
    data.rewrite("", &mixture, &[(LLM, "llm = { stages = 2, dp = 2 }")]);
    assert!(difference(&losses(&data.job.lines(&["--steps", "6"])), &losses(&straight)) < 1e-5);
    // one dataset is the same as its shards
    data.rewrite("", &format!("[data.mixture]\ndata_sets = [{{shards = [\"{shards}\"]}}]\n"), &[]);
    let alone = data.job.lines(&["--steps", "3"]);
    data.rewrite(&data.named(), "", &[]);
    assert_eq!(loss_bits(&alone), loss_bits(&data.job.lines(&["--steps", "3"])));
    assert_ne!(loss_bits(&alone), loss_bits(&straight)[..3]);
}

#[test]
fn a_run_on_a_split_has_its_samples_alone() {
    let data = OnShards::new();
    let frozen = ("learning_rate = 2e-3", "learning_rate = 0.0");
    let run = |split: &str| {
        data.rewrite(&format!("{}\nsplit = \"{split}\"", data.named()), "", &[frozen]);
        data.job.lines(&["--steps", "4"])
    };
    // eight samples are every global batch, in some order
    let eight = run("eight");
    let first = losses(&eight)[0];
    assert!(difference(&losses(&eight), &[first; 4]) < 1e-5, "{:?}", losses(&eight));
    assert_eq!(tokens(&eight), [tokens(&eight)[0]; 4]);
    let train = run("train");
    assert!(difference(&losses(&train), &[losses(&train)[0]; 4]) > 1e-4, "{:?}", losses(&train));
    data.rewrite(&format!("{}\nsplit = \"trainn\"", data.named()), "", &[]);
    let unknown = data.job.run(&[]);
    assert!(unknown.status != Some(0) && unknown.stderr.contains("trainn"), "{}", unknown.stderr);
}

#[test]
fn prompts_and_templates_are_part_of_the_texts() {
    let texts = GENERATE.replace("image_fraction = 0.4", "image_fraction = 0.0");
    let with = |generate: &str, processor: &str| {
        let tables = format!("{generate}\n[processor]\n{processor}\n");
        let job = Job::with(&[(GENERATE, &tables)]);
        let lines = job.lines(&["--steps", "3"]);
        assert!(losses(&lines).iter().all(|loss| loss.is_finite() && *loss > 0.0));
        job.rewrite(&[(GENERATE, &tables), (LLM, "llm = { stages = 2, dp = 2 }")]);
        assert!(difference(&losses(&job.lines(&["--steps", "3"])), &losses(&lines)) < 1e-5, "{processor}");
        tokens(&lines)
    };
    let prompt = "caption_prompt = \"w1 w2 w3\"";
    for generate in [GENERATE, &texts] {
        let (plain, asked) = (with(generate, ""), with(generate, prompt));
        assert!(plain.iter().zip(&asked).all(|(plain, asked)| asked > plain), "{plain:?} {asked:?}");
    }
    // eight words more in each of eight samples
    let template = |words: &str| {
        let source = format!("{words}{{% for m in messages %}}{{{{ m.content }}}} <|im_end|> {{% endfor %}}");
        with(&texts, &format!("{prompt}\nchat_template = \"{source}\""))
    };
    let (short, long) = (template(""), template("w1 w2 w3 w4 w5 w6 w7 w8 "));
    let longer: Vec<u64> = short.iter().map(|tokens| tokens + 8 * 8).collect();
    assert_eq!(long, longer);
}

#[test]
fn an_error_budget_decides_whether_a_damaged_sample_ends_the_run() {
    let tables = |budget: &str| format!("{GENERATE}\n[read]\nerror_budget = {budget}\n");
    let job = Job::new();
    job.lines(&["--steps", "1"]);
    let key = break_image(&shard(&job));
    job.rewrite(&[(GENERATE, &tables("0.5"))]);
    let run = job.run(&["--steps", "8"]);
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    let skipped = run.objects().iter().filter(|line| line["dropped_samples"] == 1).count();
    assert_eq!(skipped, 1, "an epoch has the sample once");
    job.rewrite(&[(GENERATE, &tables("0.0"))]);
    let run = job.run(&["--steps", "8"]);
    assert_eq!(run.status, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains(&key) && run.stderr.contains("budget"), "{}", run.stderr);
}

#[test]
fn a_rule_for_long_samples_limits_their_tokens() {
    let run = |rule: &str| {
        let texts = GENERATE.replace("image_fraction = 0.4", "image_fraction = 0.0");
        let job = Job::with(&[(GENERATE, &format!("{texts}\n[processor]\nlong_sample = \"{rule}\"\n"))]);
        // dropped samples are named on standard error
        let lines = || {
            let run = job.run(&["--steps", "4"]);
            assert_eq!(run.status, Some(0), "{}", run.stderr);
            run.objects()
        };
        let alone = lines();
        assert!(losses(&alone).iter().all(|loss| loss.is_finite()));
        job.rewrite(&[
            (GENERATE, &format!("{texts}\n[processor]\nlong_sample = \"{rule}\"\n")),
            (LLM, "llm = { stages = 2, dp = 2 }"),
        ]);
        assert!(difference(&losses(&lines()), &losses(&alone)) < 1e-5, "{rule}");
        alone
    };
    let whole = tokens(&run("error:1000"));
    let cut = run("truncate:12");
    assert!(tokens(&cut).iter().zip(&whole).all(|(cut, whole)| cut < whole && *cut <= 8 * 12), "{whole:?}");
    assert!(cut.iter().all(|line| line["samples"] == 8));
    let dropped = run("drop:12");
    assert!(tokens(&dropped).iter().all(|tokens| *tokens <= 8 * 12), "{:?}", tokens(&dropped));
}
