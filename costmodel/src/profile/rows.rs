//! Parses this project's profile files.

use super::held_out_run::{HELD_OUT_KEY, HeldOutRun};
use super::measurement::{Measurement, Part, Phase, Setting};
use super::table::{Row, Table};
use super::widths::ModuleWidths;
use super::{ProfileFile, SCHEMA_KEY, SCHEMA_VERSION};
use crate::error::Result;
use crate::module::Module;

const REQUIRED: [&str; 8] = ["module", "part", "phase", "tp", "layers", "batch", "tokens", "microseconds"];
const OPTIONAL: [&str; 1] = ["bytes"];

/// Parses a file in the schema described in [`super`].
pub(super) fn parse(name: &str, text: &str) -> Result<ProfileFile> {
    let table = Table::parse(name, text, &REQUIRED, &OPTIONAL)?;
    check_version(&table)?;
    let mut file = ProfileFile { name: name.to_owned(), ..ProfileFile::default() };
    for &(line, key, value) in &table.metadata {
        if key == HELD_OUT_KEY {
            let run = HeldOutRun::parse(value).map_err(|reason| table.error(line, key, reason))?;
            file.held_out.push(run);
            continue;
        }
        match Module::ALL.into_iter().find(|module| module.name() == key) {
            Some(module) => {
                let parsed = ModuleWidths::parse(value).map_err(|reason| table.error(line, key, reason))?;
                file.widths.insert(module, parsed);
            }
            None => file.metadata.push((key.to_owned(), value.to_owned())),
        }
    }
    file.measurements = table.rows().map(measurement).collect::<Result<_>>()?;
    Ok(file)
}

fn check_version(table: &Table<'_>) -> Result<()> {
    match table.metadata.first() {
        Some((_, SCHEMA_KEY, SCHEMA_VERSION)) => Ok(()),
        Some((line, SCHEMA_KEY, version)) => {
            let reason = format!("expected version {SCHEMA_VERSION} of the schema, found `{version}`");
            Err(table.error(*line, SCHEMA_KEY, reason))
        }
        _ => Err(table.error(1, "", format!("not a profile: expected `# {SCHEMA_KEY}: {SCHEMA_VERSION}`"))),
    }
}

fn measurement(row: Row<'_>) -> Result<Measurement> {
    let module = word(&row, "module", &Module::ALL, Module::name)?;
    let part = word(&row, "part", &Part::ALL, Part::name)?;
    let phase = word(&row, "phase", &Phase::ALL, Phase::name)?;
    let layers = if part.is_outside_layers() { row.count("layers")? } else { row.positive("layers")? };
    let has_shape = phase != Phase::Optimizer;
    // An optimizer step has no shape, so 0 is valid.
    let side = |column| if has_shape { row.positive(column) } else { row.count(column) };
    let (batch, tokens) = (side("batch")?, side("tokens")?);
    let setting = Setting { module, part, phase, tp: row.positive("tp")?, layers, batch, tokens };
    let bytes = if row.text("bytes").is_empty() { None } else { Some(row.count("bytes")?) };
    Ok(Measurement { setting, microseconds: row.measure("microseconds")?, bytes })
}

/// Parses a column whose value is a name in `all`.
fn word<T: Copy>(row: &Row<'_>, column: &str, all: &[T], name: fn(T) -> &'static str) -> Result<T> {
    let text = row.text(column);
    let known = || all.iter().map(|value| name(*value)).collect::<Vec<_>>().join(", ");
    let found = all.iter().copied().find(|value| name(*value) == text);
    found.ok_or_else(|| row.error(column, format!("`{text}` is not one of {}", known())))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "# dflop-profile: 1\n# device: abacus\n# llm: hidden=256 heads=4 name=tiny\n";
    const COLUMNS: &str = "module,part,phase,tp,layers,batch,tokens,microseconds,bytes\n";

    fn file(rows: &str) -> Result<ProfileFile> {
        parse("p.csv", &format!("{HEAD}{COLUMNS}{rows}"))
    }

    #[test]
    fn rows_metadata_and_dimensions_are_read() {
        let file =
            file("llm,linear,forward,1,2,1,512,12.5,1024\n\nllm , linear,backward,1,2,1,512,25,\n").unwrap();
        assert_eq!(
            file.metadata,
            [("dflop-profile", "1"), ("device", "abacus")].map(|(a, b)| (a.into(), b.into()))
        );
        assert_eq!(file.widths[&Module::Llm].to_string(), "hidden=256 heads=4 name=tiny");
        let [forward, backward] = &file.measurements[..] else { panic!("two rows") };
        assert_eq!((forward.setting.tokens, forward.bytes, backward.bytes), (512, Some(1024), None));
        assert_eq!((forward.setting.phase, backward.setting.phase), (Phase::Forward, Phase::Backward));
    }

    #[test]
    fn columns_come_in_any_order() {
        let text = "# dflop-profile: 1\nmicroseconds,tokens,batch,layers,tp,phase,part,module\n3,2,1,0,1,forward,ends,llm\n";
        let file = parse("p.csv", text).unwrap();
        assert_eq!(file.measurements[0].setting.part, Part::OutsideLayers);
        assert!((file.measurements[0].microseconds - 3.0).abs() < 1e-12);
    }

    #[test]
    fn errors_name_file_line_and_column() {
        for (rows, message) in [
            (
                "llm,linear,forward,1,2,1,512,NaN,1\n",
                "p.csv:5: column `microseconds`: `NaN` is not a measurement",
            ),
            (
                "llm,linear,forward,1,2,1,512,-3,1\n",
                "p.csv:5: column `microseconds`: `-3` is not a measurement",
            ),
            (
                "llm,linear,forward,1,2,1,512,inf,1\n",
                "p.csv:5: column `microseconds`: `inf` is not a measurement",
            ),
            (
                "llm,linear,forward,1,2,1,512,0,1\n",
                "p.csv:5: column `microseconds`: `0` is not a measurement",
            ),
            ("\nllm,linear,forward,0,2,1,512,1,1\n", "p.csv:6: column `tp`: must be at least 1"),
            ("llm,linear,forward,1,2,1,5e2,1,1\n", "p.csv:5: column `tokens`: `5e2` is not a whole number"),
            ("llm,linear,forward,1,2,1,512,1,-1\n", "p.csv:5: column `bytes`: `-1` is not a whole number"),
            (
                "llm,matmul,forward,1,2,1,512,1,1\n",
                "p.csv:5: column `part`: `matmul` is not one of linear, attention",
            ),
            ("llm,linear,forward,1\n", "p.csv:5: expected 9 fields as in the header, found 4"),
        ] {
            let found = file(rows).unwrap_err().to_string();
            assert!(found.starts_with(message), "{found}\n{message}");
        }
    }

    #[test]
    fn unknown_headers_and_versions_are_errors() {
        for (text, message) in [
            ("a,b\n1,2\n", "p.csv:1: column `module`: missing in the header"),
            ("# dflop-profile: 2\n", "p.csv:1: no header"),
            ("", "p.csv:1: no header"),
        ] {
            let found = parse("p.csv", text).unwrap_err().to_string();
            assert!(found.starts_with(message), "{found}\n{message}");
        }
        let other = parse("p.csv", &format!("# dflop-profile: 2\n{COLUMNS}")).unwrap_err().to_string();
        assert!(other.contains("expected version 1 of the schema, found `2`"), "{other}");
        let none = parse("p.csv", COLUMNS).unwrap_err().to_string();
        assert!(none.contains("not a profile"), "{none}");
        let twice = parse("p.csv", &format!("{HEAD}{},tp\n", COLUMNS.trim())).unwrap_err().to_string();
        assert!(twice.contains("column `tp`: twice in the header"), "{twice}");
        let unknown = parse("p.csv", &format!("{HEAD}{},hertz\n", COLUMNS.trim())).unwrap_err().to_string();
        assert!(unknown.contains("column `hertz`: unknown"), "{unknown}");
    }
}
