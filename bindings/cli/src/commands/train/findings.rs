//! Prints check findings as lines or as a JSON object.

use std::io::Write;

use dflop_executor::run::{Finding, Findings, Status};

use crate::failure::{Failure, escape_controls};
use crate::output::{Output, write_json};

/// Column widths for status and subject, so that findings are aligned.
const STATUS_COLUMNS: usize = 8;
const SUBJECT_COLUMNS: usize = 14;

/// Prints findings: all from rank 0, only the failed findings from other ranks.
///
/// # Errors
/// [`Failure::Failed`] if a finding is wrong.
pub(super) fn print_findings(mut findings: Findings, is_json: bool, out: &mut Output) -> Result<(), Failure> {
    if findings.rank > 0 {
        findings.checks.retain(|check| check.status == Status::Wrong);
    }
    let is_silent = findings.rank > 0 && findings.wrong == 0;
    match is_json {
        true if !is_silent => write_json(out, &findings)?,
        true => {}
        false => findings.checks.iter().try_for_each(|check| print_line(findings.rank, check, out))?,
    }
    let rank = findings.rank;
    match findings.wrong {
        0 => Ok(()),
        1 => Err(Failure::Failed(format!("the check of rank {rank} found 1 fault"))),
        wrong => Err(Failure::Failed(format!("the check of rank {rank} found {wrong} faults"))),
    }
}

fn print_line(rank: usize, check: &Finding, out: &mut Output) -> Result<(), Failure> {
    let Finding { status, subject, finding, advice } = check;
    let rank = if rank > 0 { format!("rank {rank}: ") } else { String::new() };
    let advice = advice.as_ref().map_or_else(String::new, |advice| format!("; {advice}"));
    // A message with several lines, such as a place in the configuration, continues below the start.
    let indent = format!("\n{}", " ".repeat(STATUS_COLUMNS + SUBJECT_COLUMNS + 2));
    let lines: Vec<_> = finding.lines().map(escape_controls).collect();
    let (status, finding) = (status.name(), lines.join(&indent));
    writeln!(out, "{status:<STATUS_COLUMNS$} {subject:<SUBJECT_COLUMNS$} {rank}{finding}{advice}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Sink;

    fn findings(rank: usize) -> Findings {
        let finding = |status, subject, finding: &str, advice: Option<&str>| Finding {
            status,
            subject,
            finding: finding.to_owned(),
            advice: advice.map(str::to_owned),
        };
        let checks = vec![
            finding(Status::Ok, "ranks", "2 ranks", None),
            finding(Status::Wrong, "token", "is not set", Some("set it")),
            finding(Status::Wrong, "model", "line 2\n| x", None),
        ];
        Findings { rank, wrong: 2, checks }
    }

    fn printed(findings: Findings, is_json: bool) -> (String, Result<(), Failure>) {
        let mut out = Output::new(Sink::Memory(Vec::new()));
        let done = print_findings(findings, is_json, &mut out);
        let Ok(Sink::Memory(bytes)) = out.into_inner() else { panic!("the output is in memory") };
        (String::from_utf8(bytes).unwrap(), done)
    }

    #[test]
    fn rank_0_prints_all_and_other_ranks_their_faults() {
        let (text, done) = printed(findings(0), false);
        let lines = [
            "ok       ranks          2 ranks\n",
            "wrong    token          is not set; set it\n",
            "wrong    model          line 2\n                        | x\n",
        ];
        assert_eq!(text, lines.concat());
        assert!(
            matches!(done, Err(Failure::Failed(message)) if message == "the check of rank 0 found 2 faults")
        );
        let (text, _) = printed(findings(3), false);
        assert!(text.starts_with("wrong    token          rank 3: is not set; set it\n"));
    }

    #[test]
    fn json_is_one_object_with_a_count() {
        let value: serde_json::Value = serde_json::from_str(&printed(findings(0), true).0).unwrap();
        assert_eq!((&value["rank"], &value["wrong"]), (&0.into(), &2.into()));
        assert_eq!(value["checks"][0]["status"], "ok");
        assert_eq!(value["checks"][1]["advice"], "set it");
        assert_eq!(value["checks"].as_array().map(Vec::len), Some(3));
        let sound = Findings { rank: 1, wrong: 0, checks: Vec::new() };
        assert!(printed(sound, true).0.is_empty(), "a rank without faults is silent");
    }
}
