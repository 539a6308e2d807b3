//! Tests `dflop simulate --plan`, which simulates a plan from a file or from degrees.

use serde_json::{Value, json};

use crate::command::{dflop, object, refuse, text};
use crate::methods::shapes;

/// Directory with a shape table.
struct Inputs {
    directory: tempfile::TempDir,
    shapes: String,
}

fn inputs() -> Inputs {
    let directory = tempfile::tempdir().expect("a temporary directory");
    Inputs { shapes: text(&shapes(directory.path())).to_owned(), directory }
}

const MODEL: [&str; 4] = ["--model", "llava-ov-qwen2.5-7b", "--device", "a100"];
const BATCHES: [&str; 4] = ["--gpus", "16", "--global-batch-size", "96"];

impl Inputs {
    /// Arguments that simulate these plan values.
    fn simulate<'a>(&'a self, plan: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
        let given: &[&str] = if plan.is_empty() { &[] } else { &["--plan"] };
        let shapes = ["simulate", "--shapes", &self.shapes, "--steps", "2"];
        [&shapes[..], &MODEL, &BATCHES, given, plan, more].concat()
    }

    /// Plan that `dflop plan --json` prints, and the file with it.
    fn plan(&self, settings: &[&str]) -> (Value, String) {
        let shapes = ["plan", "--shapes", &self.shapes, "--batches", "2", "--json"];
        let plan = object(&[&shapes[..], &MODEL, &BATCHES, settings].concat());
        let path = self.directory.path().join("plan.json");
        std::fs::write(&path, plan.to_string()).expect("a file");
        (plan, text(&path).to_owned())
    }
}

fn methods(report: &Value) -> &Vec<Value> {
    report["strategies"].as_array().expect("a list")
}

fn seconds(method: &Value) -> f64 {
    method["step_seconds"].as_f64().expect("seconds")
}

/// Writes a plan's modules as degrees.
fn degrees(plan: &Value) -> Vec<String> {
    let module = |module: &Value| {
        let [name, tp, pp, dp] = ["name", "tp", "pp", "dp"].map(|field| &module[field]);
        format!("{}=tp{tp},pp{pp},dp{dp}", name.as_str().expect("a name"))
    };
    plan["modules"].as_array().expect("a list").iter().map(module).collect()
}

#[test]
fn a_printed_plan_has_the_step_time_of_its_search_in_every_placement() {
    let inputs = inputs();
    for placement in ["disaggregated", "colocated", "joint"] {
        let setting = format!("space.placement={placement}");
        let (plan, file) = inputs.plan(&["--set", &setting]);
        let given = object(&inputs.simulate(&[&file], &["--json"]));
        let names: Vec<&str> = methods(&given).iter().filter_map(|method| method["name"].as_str()).collect();
        assert_eq!(names, ["data-blind", "lpt", "lpt, sorted", "dflop"]);
        let ours = &methods(&given)[3];
        assert!((seconds(ours) - plan["step_seconds"].as_f64().expect("seconds")).abs() < 1e-9, "{given}");
        assert_eq!(ours["step_seconds_p95"], plan["step_seconds_p95"]);
        assert_eq!(ours["memory"][1]["gib"], plan["memory"]["llm"]["gib"]);
        assert_eq!(ours["memory"][0]["headroom_gib"], plan["memory"]["encoder"]["headroom_gib"]);
        for field in ["modules", "microbatches", "placement", "rounds_ahead", "schedule", "gpus_used"] {
            assert_eq!(given["plan"][field], plan[field], "{field}");
        }
        assert!(given["ideal_seconds"].as_f64().expect("seconds") <= seconds(ours));
        assert!(given["searched"].is_null() && ours["fits"] == true, "{given}");
        let searched = object(&inputs.simulate(&[], &["--set", &setting, "--json"]));
        for (name, own) in ["data-blind", "lpt", "lpt, sorted", "dflop"].iter().zip(methods(&given)) {
            let row = methods(&searched).iter().find(|row| row["name"] == *name).expect("a row");
            assert!((seconds(row) - seconds(own)).abs() < 1e-9, "{placement} {name}");
            assert_eq!((&row["waits"], &row["memory"]), (&own["waits"], &own["memory"]));
        }
    }
}

#[test]
fn degrees_are_a_plan_with_even_layers() {
    let inputs = inputs();
    let settings = ["--set", "space.kinds=basic", "--set", "space.placement=disaggregated"];
    let (plan, file) = inputs.plan(&settings);
    let basic = ["--set", "space.kinds=basic", "--json"];
    let from_file = object(&inputs.simulate(&[&file], &basic));
    let degrees = degrees(&plan);
    let degrees: Vec<&str> = degrees.iter().map(String::as_str).collect();
    let microbatches = plan["microbatches"].to_string();
    let number = ["--microbatches", &microbatches];
    let from_degrees = object(&inputs.simulate(&degrees, &[&number[..], &settings, &["--json"]].concat()));
    assert_eq!(from_degrees, from_file);
    // One word, another order, and the encoder's other name.
    let word = format!("{} {}", degrees[1], degrees[0].replace("encoder", "vision"));
    let from_word = object(&inputs.simulate(&[&word], &[&number[..], &settings, &["--json"]].concat()));
    assert_eq!(from_word, from_file);
}

#[test]
fn a_plan_may_use_fewer_gpus_and_need_not_fit() {
    let inputs = inputs();
    let plan = ["llm=tp2,dp2", "vision=dp2"];
    let few = object(&inputs.simulate(&plan, &["--microbatches", "12", "--json"]));
    assert_eq!(few["plan"]["gpus_used"], 6);
    assert_eq!(few["plan"]["placement"], "disaggregated");
    for method in methods(&few) {
        let [encoder, llm] = [0_usize, 1].map(|module| &method["memory"][module]);
        let gib = llm["gib"].as_f64().expect("a number");
        assert!((gib + llm["headroom_gib"].as_f64().expect("a number") - 80.0).abs() < 1e-6);
        assert_eq!(method["fits"], gib.max(encoder["gib"].as_f64().expect("a number")) <= 80.0 / 1.1);
    }
    let small = object(&inputs.simulate(&plan, &["--microbatches", "12", "--memory-gib", "16", "--json"]));
    assert!(methods(&small).iter().all(|method| method["fits"] == false), "{small}");
    let recomputed = ["llm=tp2,dp2,recompute", "vision=dp2"];
    let recomputed = object(&inputs.simulate(&recomputed, &["--microbatches", "12", "--json"]));
    let gib = |report: &Value| methods(report)[3]["memory"][1]["gib"].as_f64().expect("a number");
    assert!(gib(&recomputed) < gib(&few));
    assert!(seconds(&methods(&recomputed)[3]) > seconds(&methods(&few)[3]));
}

#[test]
fn equal_degrees_are_a_joint_plan_unless_a_placement_is_set() {
    let inputs = inputs();
    let plan = ["llm=tp2,pp2,dp2", "vision=tp2,pp2,dp2"];
    let more = ["--microbatches", "6", "--json"];
    let joint = object(&inputs.simulate(&plan, &more));
    assert_eq!(joint["plan"]["placement"], "joint");
    assert_eq!(joint["plan"]["gpus_used"], 8);
    assert_eq!(joint["plan"]["encoder"], json!({"tp": 1, "pp": 2, "dp": 4}));
    assert_eq!(joint["plan"]["layers"], json!({"encoder": [27, 0], "llm": [14, 14]}));
    let set = ["--set", "space.placement=disaggregated"];
    let apart = object(&inputs.simulate(&plan, &[&more[..], &set].concat()));
    assert_eq!(apart["plan"]["gpus_used"], 16);
    let colocated = ["llm=tp2,pp2,dp2", "vision=tp2,dp4"];
    let set = ["--set", "space.placement=colocated"];
    let colocated = object(&inputs.simulate(&colocated, &[&more[..], &set].concat()));
    assert_eq!(colocated["plan"]["gpus_used"], 8);
}

#[test]
fn a_table_and_a_report_show_the_plan() {
    let inputs = inputs();
    let page = inputs.directory.path().join("page.json");
    let more = ["--microbatches", "12", "--report", text(&page)];
    let run = dflop(&inputs.simulate(&["llm=tp2,dp2", "vision=dp2"], &more));
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    for part in [
        "plan: encoder tp 1 pp 1 dp 2, llm tp 2 pp 1 dp 2, 12 microbatches, disaggregated, 1f1b, 6 of 16 GPUs",
        "GiB per GPU, headroom in parentheses",
        "lower bound ",
        " of this plan",
        "memory per GPU: 80.0 GiB; a plan fits up to 72.7 GiB (margin 1.1)",
    ] {
        assert!(run.stdout.contains(part), "{part} in {}", run.stdout);
    }
    assert_eq!(run.stdout.matches("\n    waits for: ").count(), 4, "{}", run.stdout);
    let page = std::fs::read_to_string(page).expect("a report");
    assert!(page.contains("GiB per GPU, dflop") && !page.contains("Plans searched"), "{page}");
}

#[test]
fn plans_that_cannot_run_are_refused_with_the_reason() {
    let inputs = inputs();
    let number = ["--microbatches", "4"];
    for (plan, mentioned) in [
        (&["llm=tp2,dp2"][..], "it has no module `encoder`"),
        (&["llm=tp2", "audio=dp2"], "the model has no module `audio`, but `encoder`, `llm`"),
        (&["llm=tp2", "vision=dp2", "encoder=dp2"], "it has the module `vision` twice"),
        (&["llm=tp2", "vision=ep2"], "only `llm` has experts"),
        (&["llm=tp2,ep2", "vision=dp2"], "expert parallelism of 2 is not one"),
        (&["llm=tp2,dq2", "vision=dp2"], "found `dq2` in `llm=tp2,dq2`"),
        (&["llm=tp2", "vision"], "found `vision`"),
        (&["llm=tp3", "vision=dp2"], "`llm` has a TP degree of 3"),
        (&["llm=pp29", "vision=dp2"], "`llm` has 29 stages for 28 layers"),
        (&["llm=tp2,pp2,dp4", "vision=dp2"], "it uses 18 GPUs, and the cluster has 16"),
        (&["llm=dp12", "vision=dp2"], "96"),
    ] {
        let number: &[&str] = if plan[0] == "llm=dp12" { &["--microbatches", "9"] } else { &number };
        refuse(&inputs.simulate(plan, number), 2, mentioned);
    }
    let joint = ["--set", "space.placement=joint"];
    let stages = inputs.simulate(&["llm=pp2,dp2", "vision=pp3"], &joint);
    refuse(&stages, 2, "with joint placement it has as many as the LLM, 2");
    let under = |plan: &[&'static str], set: [&'static str; 2], mentioned: &str| {
        refuse(
            &inputs.simulate(plan, &[&number[..], &["--set"], &set[..1], &["--set"], &set[1..]].concat()),
            2,
            mentioned,
        );
    };
    let [apart, colocated] = ["space.placement=disaggregated", "space.placement=colocated"];
    let [split, chunks] = ["plan.schedule=zb-h1", "plan.schedule=interleaved:2"];
    let plan = &["llm=pp2,dp2", "vision=dp2"];
    under(plan, [apart, chunks], "interleaved:2 is for colocated placement, and the plan's is disaggregated");
    under(&["llm=pp2,dp2,recompute", "vision=dp2"], [apart, split], "recomputing layers saves no memory");
    under(&["llm=pp15,dp1", "vision=dp15"], [colocated, chunks], "`llm` has 30 stages for 28 layers");
}

/// Two LLM ranks with two stages each, whose pipelines fill faster, and split backward passes.
#[test]
fn plans_under_every_schedule_of_the_trainer_are_simulated() {
    let inputs = inputs();
    let plan = ["llm=tp2,pp2,dp2", "vision=tp2,dp4"];
    let run = |schedule: &str| {
        let set = format!("plan.schedule={schedule}");
        let more = ["--microbatches", "6", "--set", "space.placement=colocated", "--set", &set];
        let report = object(&inputs.simulate(&plan, &[&more[..], &["--json"]].concat()));
        let table = dflop(&inputs.simulate(&plan, &more)).stdout;
        (report, table)
    };
    let (plain, _) = run("1f1b");
    for (schedule, layers) in [("interleaved:2", json!([7, 7, 7, 7])), ("zb-h1", json!([14, 14]))] {
        let (report, table) = run(schedule);
        assert_eq!(
            (&report["plan"]["schedule"], &report["plan"]["layers"]["llm"]),
            (&schedule.into(), &layers)
        );
        assert_eq!((&report["plan"]["llm"]["pp"], &report["plan"]["gpus_used"]), (&2.into(), &8.into()));
        assert!(seconds(&methods(&report)[3]) < seconds(&methods(&plain)[3]), "{schedule}: {report}");
        assert!(table.contains(&format!(", colocated, {schedule}, 8 of 16 GPUs")), "{table}");
        let ideal = report["ideal_seconds"].as_f64().expect("seconds");
        assert!(methods(&report).iter().all(|method| ideal <= seconds(method)), "{report}");
    }
}

#[test]
fn a_search_under_a_schedule_prints_a_plan_with_it() {
    let inputs = inputs();
    for (schedule, placement, chunks) in
        [("zb-h1", "disaggregated", 1), ("zb-h1", "joint", 1), ("interleaved:2", "colocated", 2)]
    {
        let (under, at) = (format!("plan.schedule={schedule}"), format!("space.placement={placement}"));
        let (plan, file) = inputs.plan(&["--set", &under, "--set", &at]);
        assert_eq!((&plan["schedule"], &plan["placement"]), (&schedule.into(), &placement.into()));
        let [pp, stages] = [
            plan["llm"]["pp"].as_u64().expect("a number"),
            plan["layers"]["llm"].as_array().expect("a list").len() as u64,
        ];
        assert_eq!(stages, pp * chunks);
        let given = object(&inputs.simulate(&[&file], &["--json"]));
        let ours = &methods(&given)[3];
        assert!((seconds(ours) - plan["step_seconds"].as_f64().expect("seconds")).abs() < 1e-9, "{given}");
        assert_eq!(ours["memory"][1]["gib"], plan["memory"]["llm"]["gib"]);
    }
}

#[test]
fn a_plan_file_of_another_model_and_arguments_without_effect_are_refused() {
    let inputs = inputs();
    let (mut plan, file) = inputs.plan(&["--set", "space.kinds=basic"]);
    for (more, mentioned) in [
        (
            &["--microbatches", "4"][..],
            "has no effect with a plan file, which has the number of microbatches",
        ),
        (&["--set", "space.placement=joint"], "has no effect with a plan file"),
        (&["--set", "plan.schedule=gpipe"], "has no effect with a plan file"),
        (&["--set", "space.recompute=true"], "has no effect with `--plan`, which searches no plans"),
        (&["--set", "space.expert_parallel=1"], "has no effect with `--plan`, which searches no plans"),
    ] {
        refuse(&inputs.simulate(&[&file], more), 2, mentioned);
    }
    let dataset = ["simulate", "data", "--global-batch-size", "8", "--dp-size", "2", "--plan", &file];
    refuse(&dataset, 2, "`--plan` belongs to `--shapes`");
    let write = |plan: &Value| std::fs::write(&file, plan.to_string()).expect("a file");
    plan["model"] = "another-7b".into();
    write(&plan);
    refuse(&inputs.simulate(&[&file], &[]), 2, "it is a plan for `another-7b`, and the model is `llava-ov");
    plan.as_object_mut().expect("an object").remove("model");
    plan["modules"][1]["layers"] = vec![40].into();
    write(&plan);
    refuse(&inputs.simulate(&[&file], &[]), 2, "`llm` has 40 layers, and the model's has 28");
    plan["modules"][0]["name"] = "audio".into();
    write(&plan);
    refuse(&inputs.simulate(&[&file], &[]), 2, "the model has no module `audio`");
    std::fs::write(&file, "{}").expect("a file");
    refuse(&inputs.simulate(&[&file], &[]), 2, "plan.json`: is no plan of `dflop plan --json`");
}
