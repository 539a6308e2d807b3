//! Finds out how much memory the process can still allocate.

use std::fs::read_to_string;
use std::path::Path;

/// Returns the bytes that this process can still allocate: the available system memory, limited by the
/// control group; `None` where neither can be read.
pub(crate) fn memory_available() -> Option<u64> {
    let system = available_of_system(&read_to_string("/proc/meminfo").ok()?);
    [system, left_in_group(Path::new("/sys/fs/cgroup"))].into_iter().flatten().min()
}

/// Reads `MemAvailable` from `/proc/meminfo`.
fn available_of_system(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}

/// Reads the bytes left in a version 2 control group; `None` without a limit.
fn left_in_group(group: &Path) -> Option<u64> {
    let bytes = |name: &str| read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    // Without a limit the file says `max`.
    Some(bytes("memory.max")?.saturating_sub(bytes("memory.current")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read() {
        let meminfo = "MemTotal:       24576000 kB\nMemAvailable:       2048 kB\n";
        assert_eq!(available_of_system(meminfo), Some(2 << 20));
        assert_eq!(available_of_system("MemTotal: 1 kB"), None);
        #[cfg(target_os = "linux")]
        assert!(memory_available().unwrap() > 0);
    }

    #[test]
    fn a_limit_of_the_group_counts() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(group.path().join(name), text).unwrap();
        write("memory.current", "300\n");
        write("memory.max", "max\n");
        assert_eq!(left_in_group(group.path()), None);
        write("memory.max", "1000\n");
        assert_eq!(left_in_group(group.path()), Some(700));
    }
}
