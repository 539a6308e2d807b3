//! Whether what is to be measured fits into memory, asked before it is tried.

use dflop_costmodel::Module;

use crate::error::{Error, Result};

/// Share of the free memory that measuring may take.
const SHARE: f64 = 0.9;

/// Bytes of memory that are free, where the system says it.
fn free_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Fails where so many bytes are not free.
pub(super) fn check(module: Module, layers: usize, needed_bytes: u64) -> Result<()> {
    against(free_bytes(), module, layers, needed_bytes)
}

fn against(free_bytes: Option<u64>, module: Module, layers: usize, needed_bytes: u64) -> Result<()> {
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
        assert!(against(None, Module::Llm, 28, u64::MAX).is_ok(), "a system that does not say");
        assert!(against(Some(1000), Module::Llm, 28, 900).is_ok());
        let error = against(Some(1000), Module::Llm, 28, 901).unwrap_err().to_string();
        assert!(
            error.starts_with("measuring 28 layers of llm takes about 901 bytes of memory, 1000 are free")
        );
        assert!(check(Module::Vision, 1, 0).is_ok());
    }
}
