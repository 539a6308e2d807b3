//! Reads a rank identity from launcher environment variables, with the host and task lists of Slurm.

use std::str::FromStr;

use crate::error::{Error, Result};
use crate::rendezvous::{JobToken, RankIdentity, RendezvousConfig};

const PORT: u16 = 29501;

/// Environment variables for one launcher.
struct LauncherVariables {
    launcher: &'static str,
    rank: &'static str,
    /// Candidates; the first variable that is set counts.
    size: &'static [&'static str],
    local_rank: &'static str,
    /// Variable with the number of ranks on this machine; for Slurm, the numbers on all machines.
    local_size: &'static str,
}

const LAUNCHERS: [LauncherVariables; 3] = [
    LauncherVariables {
        launcher: "torchrun",
        rank: "RANK",
        size: &["WORLD_SIZE"],
        local_rank: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
    },
    LauncherVariables {
        launcher: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    LauncherVariables {
        launcher: "Slurm",
        rank: "SLURM_PROCID",
        size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: "SLURM_LOCALID",
        local_size: "SLURM_STEP_TASKS_PER_NODE",
    },
];

/// Looks a variable up; an empty variable counts as not set.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Reads the identity of this process from the environment.
///
/// The first launcher whose variables are set counts; without a launcher, the job has one rank:
///
/// | launcher | variables |
/// | --- | --- |
/// | torchrun and alike | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` |
/// | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |
/// | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`, `SLURM_LOCALID`, |
/// | | `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST` |
///
/// `MASTER_ADDR` applies to all launchers. Without it, the first Slurm host is used, or 127.0.0.1 if all Open
/// MPI ranks are on the same machine. The rendezvous server listens on port `DFLOP_PORT`; without it on
/// `MASTER_PORT` + 1, because the torchrun store uses `MASTER_PORT`; without that on 29501 plus the last
/// three digits of the Slurm job id. `DFLOP_LISTEN` is the address to listen on; on the rank 0 machine, whose
/// host name may resolve to a loopback address, it is also the rendezvous server address. `DFLOP_JOB_TOKEN`
/// is the secret, and `DFLOP_STORE=launcher` means that the launcher hosts the rendezvous server.
///
/// # Errors
/// [`Error::Environment`] if a variable is invalid, or missing while other variables of the same launcher are
/// set.
pub fn identity_from_environment() -> Result<RankIdentity> {
    read(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}

/// Launcher whose variables are set in the environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundLauncher {
    /// Launcher name.
    pub name: &'static str,
    /// Number of ranks on this machine; `None` if the launcher does not set it.
    pub local_size: Option<usize>,
}

/// Returns the launcher that [`identity_from_environment`] recognizes; `None` if there is none.
#[must_use]
pub fn launcher_from_environment() -> Option<FoundLauncher> {
    found_launcher(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}

fn found_launcher(lookup: Lookup<'_>) -> Option<FoundLauncher> {
    let variables = recognize(lookup)?;
    let text = lookup(variables.local_size);
    let local_size = match variables.launcher {
        "Slurm" => text.and_then(|list| ranks_of_node(&list, lookup("SLURM_NODEID")?.parse().ok()?)),
        _ => text.and_then(|number| number.trim().parse().ok()),
    };
    Some(FoundLauncher { name: variables.launcher, local_size })
}

/// Returns the variables for the first launcher that has any variable set.
fn recognize(lookup: Lookup<'_>) -> Option<&'static LauncherVariables> {
    let is_set = |variables: &&LauncherVariables| {
        std::iter::once(&variables.rank).chain(variables.size).any(|name| lookup(name).is_some())
    };
    // torchrun comes first, because inside a Slurm or MPI job its variables are the specific ones
    LAUNCHERS.iter().find(is_set)
}

fn read(lookup: Lookup<'_>) -> Result<RankIdentity> {
    let Some(variables) = recognize(lookup) else { return Ok(RankIdentity::single()) };
    let launcher = variables.launcher;
    let size_name = variables.size.iter().find(|name| lookup(name).is_some()).unwrap_or(&variables.size[0]);
    let rank: usize = required(lookup, launcher, variables.rank)?;
    let size: usize = required(lookup, launcher, size_name)?;
    if rank >= size {
        let reason = format!("must be below the number of ranks, {size}, found {rank}");
        return Err(Error::Environment { variable: variables.rank, launcher, reason });
    }
    let local_rank = optional(lookup, launcher, variables.local_rank)?.unwrap_or(0);
    let rendezvous = if size > 1 { Some(read_rendezvous(lookup, launcher, size)?) } else { None };
    Ok(RankIdentity { rank, size, local_rank, rendezvous })
}

fn read_rendezvous(lookup: Lookup<'_>, launcher: &'static str, size: usize) -> Result<RendezvousConfig> {
    let store = lookup("DFLOP_STORE");
    if let Some(other) = store.as_deref().filter(|store| *store != "launcher") {
        let reason = format!("must be `launcher` or not set, found `{other}`");
        return Err(Error::Environment { variable: "DFLOP_STORE", launcher, reason });
    }
    let token = lookup("DFLOP_JOB_TOKEN").map(|secret| JobToken::new(&secret)).transpose()?;
    Ok(RendezvousConfig {
        host: read_host(lookup, launcher, size)?,
        port: read_port(lookup, launcher)?,
        token,
        is_hosted_by_launcher: store.is_some(),
        listen: optional(lookup, launcher, "DFLOP_LISTEN")?,
    })
}

fn read_host(lookup: Lookup<'_>, launcher: &'static str, size: usize) -> Result<String> {
    if let Some(host) = lookup("MASTER_ADDR") {
        return Ok(host);
    }
    if launcher == "Slurm"
        && let Some(list) = lookup("SLURM_STEP_NODELIST").or_else(|| lookup("SLURM_JOB_NODELIST"))
    {
        return first_host(&list).ok_or_else(|| {
            let reason = format!("must be a list of hosts, found `{list}`");
            Error::Environment { variable: "SLURM_JOB_NODELIST", launcher, reason }
        });
    }
    if optional(lookup, launcher, "OMPI_COMM_WORLD_LOCAL_SIZE")? == Some(size) && launcher == "Open MPI" {
        return Ok("127.0.0.1".into());
    }
    let reason = "not set; set it to the name or address of the machine of rank 0".to_owned();
    Err(Error::Environment { variable: "MASTER_ADDR", launcher, reason })
}

fn read_port(lookup: Lookup<'_>, launcher: &'static str) -> Result<u16> {
    if let Some(port) = optional(lookup, launcher, "DFLOP_PORT")? {
        return Ok(port);
    }
    if let Some(port) = optional::<u16>(lookup, launcher, "MASTER_PORT")? {
        let reason = "must be below 65535; or set `DFLOP_PORT`".to_owned();
        // torchrun's own store listens on `MASTER_PORT`
        return port.checked_add(1).ok_or(Error::Environment { variable: "MASTER_PORT", launcher, reason });
    }
    let job = if launcher == "Slurm" { optional::<u64>(lookup, launcher, "SLURM_JOB_ID")? } else { None };
    Ok(PORT + (job.unwrap_or(0) % 1000) as u16)
}

fn required<T: FromStr>(lookup: Lookup<'_>, launcher: &'static str, variable: &'static str) -> Result<T> {
    let missing = || Error::Environment { variable, launcher, reason: "missing".into() };
    optional(lookup, launcher, variable)?.ok_or_else(missing)
}

fn optional<T: FromStr>(
    lookup: Lookup<'_>,
    launcher: &'static str,
    variable: &'static str,
) -> Result<Option<T>> {
    let Some(text) = lookup(variable) else { return Ok(None) };
    let invalid = |_| Error::Environment { variable, launcher, reason: format!("could not parse `{text}`") };
    text.trim().parse().map(Some).map_err(invalid)
}

/// Returns the first host in a list such as `gpu[007-009,12],big`; `None` if the list is invalid.
pub(super) fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (prefix, rest) = list.split_at(end);
    if !rest.starts_with('[') {
        return (!prefix.is_empty()).then(|| prefix.to_owned());
    }
    let (numbers, rest) = rest[1..].split_once(']')?;
    let first = numbers.split([',', '-']).next().filter(|number| !number.is_empty())?;
    // a bracket may be followed by a suffix, which may contain brackets itself
    let suffix = if rest.is_empty() || rest.starts_with(',') { String::new() } else { first_host(rest)? };
    Some(format!("{prefix}{first}{suffix}"))
}

/// Returns the number of ranks on a machine from a list such as `4(x2),1`; `None` if the list is invalid or
/// too short.
pub(super) fn ranks_of_node(list: &str, node: usize) -> Option<usize> {
    let mut before = 0;
    for part in list.split(',') {
        let (ranks, machines) = match part.split_once("(x") {
            Some((ranks, machines)) => (ranks, machines.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        let ranks = ranks.parse().ok()?;
        before += machines;
        if node < before {
            return Some(ranks);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(variables: &[(&str, &str)]) -> Result<RankIdentity> {
        read(&|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    fn rendezvous(variables: &[(&str, &str)]) -> (String, u16) {
        let found = identity(variables).unwrap().rendezvous.unwrap();
        (found.host, found.port)
    }

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node-a"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn without_a_launcher_there_is_one_rank() {
        assert_eq!(identity(&[("MASTER_ADDR", "node-a")]).unwrap(), RankIdentity::single());
        assert_eq!(identity(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap(), RankIdentity::single());
    }

    #[test]
    fn torchrun_keeps_its_own_port() {
        let found = identity(&TORCHRUN).unwrap();
        assert_eq!((found.rank, found.size, found.local_rank), (3, 4, 1));
        assert_eq!(rendezvous(&TORCHRUN), ("node-a".into(), 29501));
        let own = [TORCHRUN.as_slice(), &[("DFLOP_PORT", "4000"), ("DFLOP_LISTEN", "::1")]].concat();
        assert_eq!(rendezvous(&own), ("node-a".into(), 4000));
        assert_eq!(identity(&own).unwrap().rendezvous.unwrap().listen, Some("::1".parse().unwrap()));
    }

    #[test]
    fn torchrun_inside_slurm_counts() {
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_JOB_NODELIST", "x")];
        let both = [TORCHRUN.as_slice(), &slurm].concat();
        assert_eq!(rendezvous(&both), ("node-a".into(), 29501));
    }

    #[test]
    fn slurm_names_hosts_and_a_port_of_the_job() {
        let slurm = [
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_NODELIST", "gpu[007-009,12],big"),
            ("SLURM_JOB_ID", "123456"),
        ];
        let found = identity(&slurm).unwrap();
        assert_eq!((found.rank, found.size, found.local_rank), (5, 8, 1));
        assert_eq!(rendezvous(&slurm), ("gpu007".into(), 29957));
        // a step may be smaller than the job
        let step =
            [slurm.as_slice(), &[("SLURM_STEP_NUM_TASKS", "6"), ("SLURM_STEP_NODELIST", "big")]].concat();
        assert_eq!(identity(&step).unwrap().size, 6);
        assert_eq!(rendezvous(&step).0, "big");
    }

    #[test]
    fn open_mpi_on_one_machine_needs_no_address() {
        let ranks = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
        let local = [ranks.as_slice(), &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")]].concat();
        assert_eq!(rendezvous(&local), ("127.0.0.1".into(), 29501));
        let message = identity(&ranks).unwrap_err().to_string();
        assert!(message.contains("MASTER_ADDR") && message.contains("Open MPI"), "{message}");
    }

    #[test]
    fn the_launcher_is_named_with_its_ranks_on_this_machine() {
        let found = |variables: &[(&str, &str)]| {
            let lookup = |name: &str| {
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            };
            found_launcher(&lookup).map(|launcher| (launcher.name, launcher.local_size))
        };
        assert_eq!(found(&[("MASTER_ADDR", "node-a")]), None);
        assert_eq!(found(&TORCHRUN), Some(("torchrun", None)));
        let local = [TORCHRUN.as_slice(), &[("LOCAL_WORLD_SIZE", "2")]].concat();
        assert_eq!(found(&local), Some(("torchrun", Some(2))));
        let mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "4")];
        assert_eq!(found(&mpi), Some(("Open MPI", Some(4))));
        let slurm = [("SLURM_PROCID", "5"), ("SLURM_STEP_TASKS_PER_NODE", "4(x2),1"), ("SLURM_NODEID", "2")];
        assert_eq!(found(&slurm), Some(("Slurm", Some(1))));
    }

    #[test]
    fn missing_and_invalid_variables_are_named() {
        let refuses = |variables: &[(&str, &str)], words: &str| {
            let message = identity(variables).unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
        };
        refuses(&[("RANK", "0")], "`WORLD_SIZE` of torchrun: missing");
        refuses(&[("WORLD_SIZE", "2")], "`RANK` of torchrun: missing");
        refuses(&[("RANK", "two"), ("WORLD_SIZE", "2")], "`two`");
        refuses(&[("RANK", "2"), ("WORLD_SIZE", "2")], "must be below");
        refuses(&[("RANK", "1"), ("WORLD_SIZE", "2")], "`MASTER_ADDR`");
        let last = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "65535")];
        refuses(&last, "`DFLOP_PORT`");
        refuses(
            &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_JOB_NODELIST", "a[")],
            "must be a list",
        );
    }

    #[test]
    fn the_first_host_of_a_list() {
        let first = |list| first_host(list).unwrap();
        assert_eq!(first("node"), "node");
        assert_eq!(first("a,b"), "a");
        assert_eq!(first("gpu[007-009,12],big"), "gpu007");
        assert_eq!(first("r[1-2]n[3,4].cluster,x"), "r1n3.cluster");
        for bad in ["", ",a", "a[1-2", "a[]"] {
            assert_eq!(first_host(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_ranks_of_a_machine_are_counted_through() {
        let ranks = |node| ranks_of_node("4(x2),1,3", node);
        assert_eq!([0, 1, 2, 3, 4].map(ranks), [Some(4), Some(4), Some(1), Some(3), None]);
        for bad in ["", "x", "2(x", "2(x3", "2(xa)"] {
            assert_eq!(ranks_of_node(bad, 0), None, "{bad}");
        }
    }
}
