//! Plan for `dflop simulate --plan`: a file that `dflop plan --json` printed, or degrees for each module.
//!
//! Degrees are `MODULE=tpN,ppN,dpN`, with `epN` and `recompute` where they apply.

use super::SimulateAccepted;
use crate::args::set::SetArgs;
use crate::failure::Failure;
use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::ModelSpec;
use dflop_executor::run::{PlacementName, PlanFile, PlannedModule};
use dflop_loader::settings::{Settings, SpaceSettings};
use dflop_planner::{Degrees, ModulePlan, ParallelismPlan, Placement, PlanProblem};
use std::path::Path;

/// Why the number of microbatches is refused with a plan file.
pub(super) const HAS_MICROBATCHES: &str =
    "has no effect with a plan file, which has the number of microbatches; leave it out";
/// Settings for plan kinds that are searched.
const OF_SEARCH: [&str; 4] =
    ["space.uneven_layers", "space.recompute", "space.encoder_ahead", "space.expert_parallel"];

/// Plan from the command line.
#[derive(Debug)]
pub(super) struct GivenPlan {
    modules: Vec<GivenModule>,
    /// Fields that only a plan file has; for degrees they come from arguments and settings.
    file: Option<FileFields>,
}

/// Plan file fields other than modules.
#[derive(Debug)]
struct FileFields {
    model: Option<String>,
    microbatches: u32,
    placement: Placement,
    schedule: ScheduleKind,
}

/// Module in a given plan.
#[derive(Debug)]
struct GivenModule {
    name: String,
    degrees: Degrees,
    expert_parallel: u32,
    is_recomputed: bool,
    /// Layers per stage; `None` for even layers.
    layers: Option<Vec<u32>>,
}

/// Whether a `--plan` value has degrees; otherwise it is a file name.
pub(super) fn is_degrees(value: &str) -> bool {
    let is_name = |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphabetic());
    value.split_once('=').is_some_and(|(name, _)| is_name(name))
}

fn misuse(reason: impl std::fmt::Display) -> Failure {
    Failure::Misuse(format!("invalid `plan`: {reason}"))
}

impl GivenPlan {
    /// Reads the values of `--plan`; `None` without values.
    ///
    /// # Errors
    /// [`Failure`] if a file cannot be read or is no plan, or if degrees are malformed.
    pub(super) fn read(values: &[String]) -> Result<Option<Self>, Failure> {
        match values {
            [] => Ok(None),
            [path] if !is_degrees(path) => {
                let path = Path::new(path);
                Self::from_file(PlanFile::read(path)?).map(Some).map_err(|error| error.in_file(path))
            }
            values => {
                // Several modules may come in one word.
                let words = values.iter().flat_map(|value| value.split_whitespace());
                let modules = words.map(|word| GivenModule::parse(word).map_err(misuse));
                Ok(Some(Self { modules: modules.collect::<Result<_, Failure>>()?, file: None }))
            }
        }
    }

    fn from_file(file: PlanFile) -> Result<Self, Failure> {
        let PlanFile { model, modules, microbatches, placement, schedule, rounds_ahead, .. } = file;
        // The schedule's name includes the rounds ahead, in plans of this program.
        let schedule = match rounds_ahead {
            0 => schedule.parse::<ScheduleKind>()?,
            rounds => ScheduleKind::EncoderAhead { rounds },
        };
        let placement = match placement {
            PlacementName::Disaggregated => Placement::Disaggregated,
            PlacementName::Colocated => Placement::Colocated,
            PlacementName::Joint => Placement::Joint,
        };
        let microbatches = number(microbatches)?;
        let module = |module: PlannedModule| {
            let chunks = if module.name == "llm" { schedule.chunks() } else { 1 };
            GivenModule::from_file(module, chunks)
        };
        let modules = modules.into_iter().map(module).collect::<Result<_, Failure>>()?;
        Ok(Self { modules, file: Some(FileFields { model, microbatches, placement, schedule }) })
    }

    /// Rejects settings that have no effect on a given plan.
    ///
    /// # Errors
    /// [`Failure::Misuse`] with the first such setting.
    pub(super) fn refuse_settings(&self, set: &SetArgs<SimulateAccepted>) -> Result<(), Failure> {
        set.refuse(&OF_SEARCH, "has no effect with `--plan`, which searches no plans; leave it out")?;
        if self.file.is_some() {
            let reason = "has no effect with a plan file, which has it; leave it out";
            set.refuse(&["space.placement", "plan.schedule"], reason)?;
        }
        Ok(())
    }

    /// Converts to a plan for a problem's modules.
    ///
    /// - `microbatches`, `settings`: number, placement and schedule for a plan from degrees
    ///
    /// # Errors
    /// [`Failure::Misuse`] if the plan belongs to a different model.
    pub(super) fn to_plan(
        &self,
        problem: &PlanProblem<'_>,
        spec: &ModelSpec,
        microbatches: usize,
        settings: &Settings,
    ) -> Result<ParallelismPlan, Failure> {
        let planned_for = self.file.as_ref().and_then(|file| file.model.as_ref());
        if let Some(model) = planned_for.filter(|model| **model != spec.name) {
            return Err(misuse(format!("it is a plan for `{model}`, and the model is `{}`", spec.name)));
        }
        let (encoders, llm) = self.find_modules(problem)?;
        if let Some(encoder) = encoders.iter().find(|encoder| encoder.expert_parallel != 1) {
            return Err(misuse(format!("only `llm` has experts, and `{}` has `ep`", encoder.name)));
        }
        let (placement, schedule) = match &self.file {
            Some(file) => (file.placement, file.schedule),
            None => (placement(&encoders, llm, &settings.space), settings.plan.pipeline_schedule()),
        };
        // Its number of stages is bounded by its layers, and so are the stages of joint encoders.
        let planned_llm = llm.to_module(problem.llm.layers(), schedule.chunks())?;
        let layers = problem.encoders.iter().map(|encoder| encoder.layers());
        let encoders = encoders.into_iter().zip(layers).map(|(encoder, layers)| match placement {
            Placement::Joint => encoder.to_joint_encoder(llm, layers),
            Placement::Disaggregated | Placement::Colocated => encoder.to_module(layers, 1),
        });
        Ok(ParallelismPlan {
            encoders: encoders.collect::<Result<_, Failure>>()?,
            llm: planned_llm,
            expert_parallel: llm.expert_parallel,
            microbatches: match &self.file {
                Some(file) => file.microbatches,
                None => number(microbatches)?,
            },
            placement,
            schedule,
        })
    }

    /// Finds the encoders, in problem order, and the LLM.
    fn find_modules(&self, problem: &PlanProblem<'_>) -> Result<(Vec<&GivenModule>, &GivenModule), Failure> {
        // A single encoder has two names.
        let own = problem.encoders.iter().map(|encoder| encoder.name());
        let encoders: Vec<[&str; 2]> =
            problem.encoder_names().into_iter().zip(own).map(|(one, other)| [one, other]).collect();
        let known = |name: &str| name == "llm" || encoders.iter().any(|names| names.contains(&name));
        if let Some(unknown) = self.modules.iter().find(|module| !known(&module.name)) {
            let names: Vec<&str> = encoders.iter().map(|[name, _]| *name).chain(["llm"]).collect();
            let (unknown, names) = (&unknown.name, names.join("`, `"));
            return Err(misuse(format!("the model has no module `{unknown}`, but `{names}`")));
        }
        let find = |names: &[&str]| {
            let mut found = self.modules.iter().filter(|module| names.contains(&module.name.as_str()));
            match (found.next(), found.next()) {
                (Some(module), None) => Ok(module),
                (Some(module), Some(_)) => Err(misuse(format!("it has the module `{}` twice", module.name))),
                (None, _) => Err(misuse(format!("it has no module `{}`", names[0]))),
            }
        };
        let llm = find(&["llm"])?;
        let encoders = encoders.iter().map(|names| find(names)).collect::<Result<_, Failure>>()?;
        Ok((encoders, llm))
    }
}

/// Returns the placement in the settings; without one, joint if all encoders have the LLM's degrees.
fn placement(encoders: &[&GivenModule], llm: &GivenModule, space: &SpaceSettings) -> Placement {
    match <[bool; 3]>::from(space.placement) {
        [true, false, false] => Placement::Disaggregated,
        [false, true, false] => Placement::Colocated,
        [false, false, true] => Placement::Joint,
        _ if encoders.iter().all(|encoder| encoder.degrees == llm.degrees) => Placement::Joint,
        _ => Placement::Disaggregated,
    }
}

fn number(count: usize) -> Result<u32, Failure> {
    u32::try_from(count).map_err(|_| misuse(format!("{count} is too large")))
}

impl GivenModule {
    /// Converts a module whose ranks hold this many stages each.
    fn from_file(module: PlannedModule, chunks: usize) -> Result<Self, Failure> {
        let PlannedModule { name, tp, dp, ep, layers, recompute } = module;
        let stages = layers.len();
        if !stages.is_multiple_of(chunks) {
            return Err(misuse(format!(
                "`{name}` has {stages} stages, which ranks with {chunks} do not divide"
            )));
        }
        let degrees = Degrees { tp: number(tp)?, pp: number(stages / chunks)?, dp: number(dp)? };
        Ok(Self {
            name,
            degrees,
            expert_parallel: number(ep.unwrap_or(1))?,
            is_recomputed: recompute,
            layers: Some(layers.into_iter().map(number).collect::<Result<_, Failure>>()?),
        })
    }

    /// Parses degrees such as `llm=tp4,pp2,dp8`.
    fn parse(text: &str) -> Result<Self, String> {
        let expected = "expected `MODULE=tpN,ppN,dpN`, for example `llm=tp4,pp2,dp8`";
        let Some((name, degrees)) = text.split_once('=') else {
            return Err(format!("{expected}, or one plan file, found `{text}`"));
        };
        let mut module = Self {
            name: name.to_owned(),
            degrees: Degrees { tp: 1, pp: 1, dp: 1 },
            expert_parallel: 1,
            is_recomputed: false,
            layers: None,
        };
        for part in degrees.split(',') {
            module.set(part).ok_or_else(|| {
                format!("{expected}, `epN` for the LLM's experts, or `recompute`, found `{part}` in `{text}`")
            })?;
        }
        Ok(module)
    }

    /// Sets a degree or recomputation; `None` if the part is malformed.
    fn set(&mut self, part: &str) -> Option<()> {
        if part == "recompute" {
            self.is_recomputed = true;
            return Some(());
        }
        let (degree, number) = part.split_at_checked(2)?;
        let number = number.parse::<u32>().ok().filter(|number| *number > 0)?;
        match degree {
            "tp" => self.degrees.tp = number,
            "pp" => self.degrees.pp = number,
            "dp" => self.degrees.dp = number,
            "ep" => self.expert_parallel = number,
            _ => return None,
        }
        Some(())
    }

    /// Converts to a plan for a module with this many layers, and stages on each rank.
    fn to_module(&self, layers: u32, chunks: usize) -> Result<ModulePlan, Failure> {
        let (name, degrees, chunks) = (&self.name, self.degrees, number(chunks)?);
        let stages = degrees.pp.saturating_mul(chunks);
        let own = match &self.layers {
            Some(layers) => layers.clone(),
            None if stages > layers => {
                return Err(misuse(format!("`{name}` has {stages} stages for {layers} layers")));
            }
            None => ModulePlan::in_chunks(layers, degrees, chunks).layers,
        };
        Ok(ModulePlan { degrees, layers: own, is_recomputed: self.is_recomputed })
    }

    /// Converts to a plan for an encoder with this many layers in the LLM's stages: without given layers all
    /// are in the first stage, whole on each GPU.
    fn to_joint_encoder(&self, llm: &Self, layers: u32) -> Result<ModulePlan, Failure> {
        if self.layers.is_some() {
            return self.to_module(layers, 1);
        }
        let Degrees { tp, pp, dp } = llm.degrees;
        if self.degrees.pp != pp {
            let (name, own) = (&self.name, self.degrees.pp);
            return Err(misuse(format!(
                "`{name}` has {own} stages; with joint placement it has as many as the LLM, {pp}"
            )));
        }
        // The LLM's degrees name the LLM's GPUs, and each of them is an encoder rank.
        let is_alike = self.degrees == llm.degrees;
        let degrees = if is_alike { Degrees { tp: 1, pp, dp: dp.saturating_mul(tp) } } else { self.degrees };
        let others = std::iter::repeat_n(0, (pp as usize).saturating_sub(1));
        let layers = std::iter::once(layers).chain(others).collect();
        Ok(ModulePlan { degrees, layers, is_recomputed: self.is_recomputed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn degrees_have_a_text_form() {
        let module = GivenModule::parse("llm=pp2,tp4,ep8,recompute").unwrap();
        assert_eq!(module.degrees, Degrees { tp: 4, pp: 2, dp: 1 });
        assert_eq!((module.expert_parallel, module.is_recomputed, module.layers), (8, true, None));
        for text in ["llm", "llm=", "llm=tp", "llm=tp0", "llm=t4", "llm=tp4;pp2", "llm=é4"] {
            let error = GivenModule::parse(text).unwrap_err();
            assert!(error.contains("`llm=tp4,pp2,dp8`") && error.contains(text), "{error}");
        }
    }

    #[test]
    fn file_names_are_no_degrees() {
        assert!(is_degrees("llm=tp4") && is_degrees("vision=x"));
        assert!(!is_degrees("plan.json") && !is_degrees("./llm=4.json") && !is_degrees("=tp4"));
    }
}
