//! `dflop models`: lists the known model families, or explains a model.

mod checkpoint;
mod description;
mod level;

use std::io::Write;

use clap::Args;

use self::checkpoint::{CheckpointReport, checkpoint_report};
use crate::args::model::model_spec;
use crate::failure::Failure;
use crate::output::{Output, write_json};
use checkpoint::{FamilyRow, family_rows};

/// List the model families that are known and how far each is supported, or explain one model.
///
/// Levels: `cost` counts tokens and predicts costs, so that data can be indexed and balanced; `plan` finds
/// parallelism; `inputs` prepares samples as the model's processor does; `train` trains with the executor.
#[derive(Debug, Args)]
pub(crate) struct ModelsArgs {
    /// Explain this model: a preset, the directory of a checkpoint, or a description; several are joined.
    #[arg(long, value_name = "NAME|DIR")]
    model: Vec<String>,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ModelsArgs, out: &mut Output) -> Result<(), Failure> {
    if args.model.is_empty() {
        let rows = family_rows();
        if args.json {
            return write_json(out, &serde_json::json!({ "families": rows }));
        }
        return print_families(out, &rows);
    }
    let report = checkpoint_report(&args.model, &model_spec(&args.model)?)?;
    if args.json { write_json(out, &report) } else { print_checkpoint(out, &report) }
}

fn print_families(out: &mut Output, rows: &[FamilyRow]) -> Result<(), Failure> {
    let width = |cell: fn(&FamilyRow) -> usize| rows.iter().map(cell).max().unwrap_or(0);
    let [families, types] = [width(|row| row.family.len()), width(|row| row.model_types.join(", ").len())];
    let levels = width(|row| row.support.names().len());
    let [names, model_types] = ["levels", "model types"];
    writeln!(out, "{:families$}  {names:levels$}  transformers  {model_types:types$}  presets", "family")?;
    for row in rows {
        let checked = row.transformers.unwrap_or("-");
        let model_types = row.model_types.join(", ");
        let presets = row.presets.join(", ");
        let line = format!(
            "{:families$}  {:levels$}  {checked:12}  {model_types:types$}  {presets}",
            row.family,
            row.support.names()
        );
        writeln!(out, "{}", line.trim_end())?;
    }
    writeln!(out, "\nany other model: docs/any-model.md")?;
    Ok(())
}

fn print_checkpoint(out: &mut Output, report: &CheckpointReport) -> Result<(), Failure> {
    let mut line = |name: &str, value: &str| writeln!(out, "{name:12} {value}");
    line("model", &report.model)?;
    line("family", &report.family)?;
    line("read", &report.files.join(", "))?;
    for module in &report.modules {
        line(module.module.name(), &format!("{} parameters", grouped(module.parameters)))?;
    }
    line("all", &format!("{} parameters", grouped(report.parameters)))?;
    if report.active_parameters < report.parameters {
        line("active", &format!("{} parameters per token", grouped(report.active_parameters)))?;
    }
    if let Some(description) = &report.description {
        line("described", &format!("{} by {}", description.model_type, description.made_with))?;
        for row in &description.modules {
            let (name, costs) = (row.module.name(), row.costs);
            line(&format!("{name} layers"), &format!("{}; costs by {costs}", row.layers))?;
            if let Some(tokens) = &row.tokens {
                line(&format!("{name} rule"), tokens)?;
            }
        }
    }
    for example in &report.examples {
        let tokens = match &example.refused {
            Some(reason) => format!("refused: {reason}"),
            None => format!(
                "{} tokens, of {} in the encoder",
                grouped(example.tokens),
                grouped(example.encoder_tokens)
            ),
        };
        line(example.medium, &tokens)?;
    }
    line("levels", &report.support.names())?;
    for lack in &report.support.lacks {
        line(&format!("no {}", lack.level), &lack.because)?;
    }
    if let Some(version) = report.transformers {
        line("checked", &format!("against transformers {version}"))?;
    }
    Ok(())
}

/// Formats a count in three-digit groups.
fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let first = digits.len() % 3;
    let (head, tail) = digits.split_at(first);
    let groups = tail.as_bytes().chunks(3).map(String::from_utf8_lossy);
    let head = (!head.is_empty()).then_some(head.into()).into_iter();
    head.chain(groups).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn counts_are_grouped_by_thousands() {
        for (count, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (12_345_678, "12,345,678")] {
            assert_eq!(grouped(count), text);
        }
    }
}
