//! Tests `dflop plan --trainer torch`: plans, memory and lines for `dflop.torch.Pipeline`.

use serde_json::Value;

use crate::command::{dflop, object, refuse, text};
use crate::methods::shapes;

const MODEL: [&str; 4] = ["--model", "llava-ov-qwen2.5-7b", "--device", "h200"];
const BATCHES: [&str; 4] = ["--gpus", "12", "--global-batch-size", "48"];
const TORCH: [&str; 2] = ["--trainer", "torch"];

/// Directory with a shape table.
struct Inputs {
    directory: tempfile::TempDir,
    shapes: String,
}

fn inputs() -> Inputs {
    let directory = tempfile::tempdir().expect("a temporary directory");
    Inputs { shapes: text(&shapes(directory.path())).to_owned(), directory }
}

impl Inputs {
    fn args<'a>(&'a self, command: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
        [command, &["--shapes", &self.shapes], &MODEL, &BATCHES, more].concat()
    }

    fn plan(&self, more: &[&str]) -> Value {
        let more = [&["--json"], more].concat();
        object(&self.args(&["plan", "--batches", "2"], &more))
    }

    fn write(&self, plan: &Value) -> String {
        let path = self.directory.path().join("plan.json");
        std::fs::write(&path, plan.to_string()).expect("a file");
        text(&path).to_owned()
    }
}

fn lines(list: &Value) -> Vec<&str> {
    list.as_array().expect("a list").iter().filter_map(Value::as_str).collect()
}

#[test]
fn an_answer_names_what_to_pass_and_the_same_layouts() {
    let inputs = inputs();
    let plan = inputs.plan(&TORCH);
    let modules = plan["modules"].as_array().expect("a list");
    assert_eq!(modules[0]["name"], "vision");
    assert!(modules.iter().all(|module| module["tp"] == 1), "{plan}");
    let trainer = &plan["trainer"];
    assert_eq!([&trainer["name"], &trainer["is_sharded"]], [&Value::from("torch"), &Value::Bool(true)]);
    assert_eq!(trainer["times_factor"], 1.0);
    let ranks = plan["gpus_used"].as_u64().expect("a number");
    let command = lines(&trainer["launch"])[0];
    assert!(command.starts_with("torchrun --nnodes 2 --nproc-per-node") || ranks <= 8, "{command}");
    let python = lines(&trainer["python"]).join("\n");
    for part in ["dflop.torch.split(", "plan=plan", "dflop.torch.Pipeline(build, plan, loader)", "AdamW"] {
        assert!(python.contains(part), "{python}");
    }
    let layouts = plan["data_parallel"].as_array().expect("a list");
    assert!(layouts.iter().any(|layout| layout["layout"].as_str().is_some_and(|name| name.contains("FSDP"))));
    let printed = dflop(&inputs.args(&["plan", "--batches", "2"], &TORCH)).stdout;
    for part in ["trainer: dflop.torch.Pipeline, eager modules", "pass this, with", "    torchrun", "DDP"] {
        assert!(printed.contains(part), "{printed}");
    }
    let simulated = object(&inputs.args(
        &["simulate", "--steps", "2", "--plan", &inputs.write(&plan)],
        &[&TORCH[..], &["--json"]].concat(),
    ));
    let ours = simulated["strategies"].as_array().expect("a list").last().expect("a method");
    assert_eq!([&ours["step_seconds"], &ours["plan"]["modules"]], [&plan["step_seconds"], &plan["modules"]]);
}

#[test]
fn eager_modules_need_more_memory_and_other_answers_stay_as_they_were() {
    let inputs = inputs();
    let [executor, named] = [&[][..], &["--trainer", "dflop"]].map(|more| inputs.plan(more));
    assert!(executor.get("trainer").is_none() && named.get("trainer").is_none());
    assert_eq!(executor["modules"], named["modules"]);
    let file = inputs.write(&inputs.plan(&TORCH));
    let gib = |more: &[&str]| {
        let args = ["simulate", "--steps", "2", "--json", "--plan", &file];
        let answer = object(&inputs.args(&args, more));
        answer["strategies"][3]["memory"][1]["gib"].as_f64().expect("a number")
    };
    assert!(gib(&TORCH) > gib(&[]), "{} {}", gib(&TORCH), gib(&[]));
}

#[test]
fn what_pytorch_does_not_run_is_refused_by_name() {
    let inputs = inputs();
    for (setting, mentioned) in [
        ("space.sequence_parallel=true", "whose stages run on one rank each"),
        ("space.expert_parallel=2", "`--set space.expert_parallel=2` has no effect"),
        ("space.encoder_share=tile", "shares whole media between ranks"),
    ] {
        refuse(&inputs.args(&["plan"], &[&TORCH[..], &["--set", setting]].concat()), 2, mentioned);
    }
    let degrees = ["--plan", "llm=tp2,pp2,dp1", "vision=tp1,dp2", "--microbatches", "8"];
    let refused = inputs.args(&["simulate"], &[&degrees[..], &TORCH].concat());
    refuse(&refused, 2, "`llm` has a TP degree of 2; trainer `torch` runs stages on one rank each");
    refuse(&inputs.args(&["plan"], &["--trainer", "jax"]), 2, "[possible values: dflop, torch]");
}
