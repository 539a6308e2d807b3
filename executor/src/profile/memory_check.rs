//! Checks free memory before a module is measured.

use dflop_costmodel::Module;

use crate::error::{Error, Result};

/// Maximum fraction of free memory for a measurement.
const SHARE: f64 = 0.9;

/// Returns the number of free bytes, if the system reports it.
fn free_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Fails if fewer than `needed_bytes` are free.
pub(super) fn check(module: Module, layers: usize, needed_bytes: u64) -> Result<()> {
    check_against(free_bytes(), module, layers, needed_bytes)
}

fn check_against(free_bytes: Option<u64>, module: Module, layers: usize, needed_bytes: u64) -> Result<()> {
    match free_bytes {
        Some(free_bytes) if needed_bytes as f64 > SHARE * free_bytes as f64 => {
            Err(Error::InsufficientMemory { module, layers, needed_bytes, free_bytes })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_before_it_is_tried() {
        assert!(
            check_against(None, Module::Llm, 28, u64::MAX).is_ok(),
            "a system that does not report free memory"
        );
        assert!(check_against(Some(1000), Module::Llm, 28, 900).is_ok());
        let error = check_against(Some(1000), Module::Llm, 28, 901).unwrap_err().to_string();
        assert!(
            error.starts_with("measuring 28 layers of llm takes about 901 bytes of memory, 1000 are free")
        );
        assert!(check(Module::Vision, 1, 0).is_ok());
    }
}
