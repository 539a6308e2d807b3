//! `dflop man`: prints a manual page, for `man` and for packages.

use std::io::Write;

use clap::Args;
use clap_mangen::Man;

use crate::failure::Failure;
use crate::output::Output;

/// Print the manual page of dflop, or of a command.
///
/// To read it: `dflop man stream | man -l -`. To install all pages: `dflop man > dflop.1`, and `dflop man
/// COMMAND > dflop-COMMAND.1` for every command.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Command name [default: the page that lists all commands].
    #[arg(value_name = "COMMAND")]
    command: Option<String>,
}

pub(crate) fn run(args: &ManArgs, out: &mut Output) -> Result<(), Failure> {
    out.write_all(&page(args.command.as_deref())?)?;
    Ok(())
}

/// Returns the page of a command, in the format of `man`.
///
/// # Errors
/// [`Failure::Misuse`] for an unknown command.
fn page(name: Option<&str>) -> Result<Vec<u8>, Failure> {
    let mut all = crate::described();
    // Fills in what commands inherit, such as the version.
    all.build();
    let command = match name {
        None => &all,
        Some(name) => all.find_subcommand(name).ok_or_else(|| unknown(&all, name))?,
    };
    let title = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    let page = Man::new(command.clone()).title(title).manual("dflop");
    let mut text = Vec::new();
    page.render(&mut text)?;
    Ok(text)
}

fn unknown(all: &clap::Command, name: &str) -> Failure {
    let names: Vec<&str> = all.get_subcommands().map(clap::Command::get_name).collect();
    Failure::Misuse(format!("expected a command of {}, found `{name}`", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_with_its_options() {
        for command in crate::described().get_subcommands() {
            let text = String::from_utf8(page(Some(command.get_name())).unwrap()).unwrap();
            let title = format!(".TH dflop-{} 1", command.get_name());
            assert!(text.contains(&title), "{text}");
            for option in command.get_arguments().filter_map(clap::Arg::get_long) {
                assert!(text.contains(&option.replace('-', "\\-")), "{title}: {option}");
            }
        }
    }
}
