//! `dflop completions`: prints a script with which a shell completes commands, options and their values.
//!
//! Values with a list of names, such as those of `--decode` and `--device`, are completed from the list; all
//! other values as file names.

use std::io::Write;

use clap::builder::PossibleValuesParser;
use clap::{Args, Command, ValueEnum};
use clap_complete::generate;
use clap_complete::shells::{Bash, Fish, Zsh};
use dflop_balancer::Strategy;
use dflop_costmodel::DeviceRate;

use crate::failure::Failure;
use crate::output::Output;

/// Print a script that completes commands and options in a shell.
///
/// Bash: `source <(dflop completions bash)` in `~/.bashrc`. Zsh: `dflop completions zsh > ~/.zfunc/_dflop`,
/// with `fpath+=~/.zfunc` before `compinit` in `~/.zshrc`. Fish: `dflop completions fish >
/// ~/.config/fish/completions/dflop.fish`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Shell.
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

pub(crate) fn run(args: &CompletionsArgs, out: &mut Output) -> Result<(), Failure> {
    out.write_all(&script(args.shell))?;
    Ok(())
}

/// Returns the script for a shell.
fn script(shell: Shell) -> Vec<u8> {
    let mut command = with_names(crate::described());
    let mut script = Vec::new();
    match shell {
        Shell::Bash => generate(Bash, &mut command, "dflop", &mut script),
        Shell::Zsh => generate(Zsh, &mut command, "dflop", &mut script),
        Shell::Fish => generate(Fish, &mut command, "dflop", &mut script),
    }
    script
}

/// Lists the names of options that accept names only, which the parser reads as text for better messages.
fn with_names(command: Command) -> Command {
    let strategies = Strategy::ALL.iter().map(|strategy| strategy.name()).collect();
    let names = [("device", DeviceRate::preset_names().to_vec()), ("strategy", strategies)];
    command.mut_subcommands(|mut command| {
        for (id, names) in &names {
            if command.get_arguments().any(|argument| argument.get_id() == *id) {
                let names = PossibleValuesParser::new(names.iter().copied());
                command = command.mut_arg(*id, |argument| argument.value_parser(names));
            }
        }
        command
    })
}
