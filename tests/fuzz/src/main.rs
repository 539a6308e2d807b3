//! Runs the fuzz target named by `FUZZ_TARGET` under libFuzzer.

#![no_main]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

/// Maximum size of a single allocation: a larger request from an input of a few kilobytes is a finding.
const ALLOCATION_BYTES_MAX: usize = 1 << 30;

/// The system's allocator, which ends the process at an allocation over the limit.
struct Limited;

#[global_allocator]
static ALLOCATOR: Limited = Limited;

fn check(bytes: usize) {
    if bytes > ALLOCATION_BYTES_MAX {
        eprintln!("an allocation of {bytes} bytes");
        std::process::abort();
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        check(layout.size());
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        check(layout.size());
        // SAFETY: the caller upholds the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        check(bytes);
        // SAFETY: the caller upholds the contract of `realloc`.
        unsafe { System.realloc(pointer, layout, bytes) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    // libFuzzer's hook ends the process at any panic; panics that the loader catches on purpose are no
    // findings.
    std::panic::set_hook(Box::new(|_| {}));
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let all = || dflop_tests::fuzz::TARGETS.iter().chain(dflop_cli::fuzz::TARGETS);
    all().find(|(known, _)| *known == name).map(|(_, run)| *run).unwrap_or_else(|| {
        eprintln!(
            "FUZZ_TARGET must be one of {}",
            all().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
        );
        std::process::exit(2)
    })
});

fuzz_target!(|bytes: &[u8]| {
    let target = *TARGET;
    if let Err(panic) = std::panic::catch_unwind(|| target(bytes)) {
        let message = panic.downcast_ref::<String>().map(String::as_str);
        eprintln!(
            "panic: {}",
            message.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
        );
        std::process::abort();
    }
});
