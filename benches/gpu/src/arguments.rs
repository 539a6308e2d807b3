//! Command line arguments.

use std::path::PathBuf;

/// Action of a program run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Arguments {
    /// Part to run.
    pub(crate) part: String,
    /// Whether shapes are small enough for a stand-in on a CPU to run them in seconds.
    pub(crate) is_tiny: bool,
    /// Whether attention is computed by our kernels or cuDNN, whichever is faster.
    pub(crate) is_fastest: bool,
    /// Seconds in which cuDNN plans are built and measured before times are measured, if specified.
    pub(crate) settling_seconds: Option<f64>,
    /// Whether operations run once only, for a sanitizer.
    pub(crate) is_small: bool,
    /// Random seed, if specified.
    pub(crate) seed: Option<u64>,
    /// Directory that files for the PyTorch side are written to.
    pub(crate) directory: Option<PathBuf>,
    /// Name of the trained model, or of the compared result set.
    pub(crate) set: String,
    /// Files with results, to compare.
    pub(crate) files: Vec<PathBuf>,
}

impl Arguments {
    /// Parses arguments, without the program name.
    ///
    /// # Errors
    /// Text for the user.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let part = arguments.next().ok_or("expected the name of a part, found nothing")?;
        let mut parsed = Self {
            part,
            is_tiny: false,
            is_fastest: false,
            settling_seconds: None,
            is_small: false,
            seed: None,
            directory: None,
            set: String::new(),
            files: Vec::new(),
        };
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("`{argument}` needs a value"));
            match argument.as_str() {
                "--tiny" => parsed.is_tiny = true,
                "--fastest" => parsed.is_fastest = true,
                "--small" => parsed.is_small = true,
                "--seed" => {
                    let text = value()?;
                    parsed.seed = Some(text.parse().map_err(|_| format!("`{text}` is not a seed"))?);
                }
                "--settle" => {
                    let text = value()?;
                    let seconds = text.parse().map_err(|_| format!("`{text}` is no number of seconds"))?;
                    parsed.settling_seconds = Some(seconds);
                }
                "--write" => parsed.directory = Some(value()?.into()),
                "--set" => parsed.set = value()?,
                option if option.starts_with('-') => return Err(format!("there is no option `{option}`")),
                file => parsed.files.push(file.into()),
            }
        }
        parsed.check()?;
        Ok(parsed)
    }

    /// Checks that a part without choices is given none.
    fn check(&self) -> Result<(), String> {
        if self.part != "machines" {
            return Ok(());
        }
        let has_option = self.is_tiny || self.is_fastest || self.is_small || !self.set.is_empty();
        let has_value = self.settling_seconds.is_some() || self.seed.is_some() || self.directory.is_some();
        match self.files.first() {
            Some(file) => Err(format!("`machines` takes no file, found `{}`", file.display())),
            None if has_option || has_value => Err("`machines` takes no options".to_owned()),
            None => Ok(()),
        }
    }

    /// Returns the seed: the specified seed, or the time.
    pub(crate) fn seed(&self) -> u64 {
        let from_time =
            || std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |elapsed| elapsed.as_nanos() as u64);
        self.seed.unwrap_or_else(from_time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Arguments, String> {
        Arguments::parse(text.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn options_and_files_follow_the_part() {
        let parsed = parse("compare --set gemm --tiny a.jsonl --seed 7 b.jsonl").unwrap();
        assert_eq!((parsed.part.as_str(), parsed.set.as_str(), parsed.seed()), ("compare", "gemm", 7));
        assert!(parsed.is_tiny && !parsed.is_small);
        assert_eq!(parsed.files, [PathBuf::from("a.jsonl"), PathBuf::from("b.jsonl")]);
    }

    #[test]
    fn a_mistake_is_named() {
        for (text, expected) in [
            ("", "expected the name"),
            ("gemm --seed x", "`x` is not a seed"),
            ("gemm --set", "`--set` needs a value"),
            ("gemm --tniy", "no option `--tniy`"),
            ("machines 4", "`machines` takes no file, found `4`"),
            ("machines --seed 3", "`machines` takes no options"),
            ("machines --tiny", "`machines` takes no options"),
        ] {
            let problem = parse(text).unwrap_err();
            assert!(problem.contains(expected), "{problem}");
        }
    }
}
