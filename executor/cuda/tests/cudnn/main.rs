//! Builds attention plans for devices that this machine does not have.
#![expect(unsafe_code, reason = "opens the stand-in of the driver")]

use dflop_cuda::cudnn::{DeviceProperties, Heads, Library, PlanKey, Plans};
use std::num::NonZeroUsize;
use std::time::Instant;

#[test]
fn explore() {
    let folder = std::env::var("DFLOP_CUDNN_LIBRARY_DIR").unwrap();
    let _stub =
        unsafe { libloading::os::unix::Library::open(Some(std::env::var("STUB").unwrap()), 0x102) }.unwrap();
    let library = Library::open(Some(std::path::Path::new(&folder))).unwrap();
    println!("{}", library.version());
    let only = std::env::var("ONLY").unwrap_or_default();
    for (name, device) in [
        ("H200", DeviceProperties::h200()),
        ("A100", DeviceProperties::a100()),
        ("B200", DeviceProperties::b200()),
    ] {
        if !name.contains(&only) {
            continue;
        }
        let plans = Plans::new(
            &library,
            device,
            std::env::var("PLANS").ok().as_deref().map(std::path::Path::new),
            NonZeroUsize::new(64).unwrap(),
        )
        .unwrap();
        for (heads, kv_heads, head_dim, is_causal) in
            [(28, 4, 128, true), (28, 4, 128, false), (16, 16, 72, false)]
        {
            let heads = Heads { heads, kv_heads, head_dim, is_causal };
            for is_backward in [false, true] {
                let starts = [0, 100, 4000, 8192];
                let key = if is_backward {
                    PlanKey::backward(heads, &starts, false)
                } else {
                    PlanKey::forward(heads, &starts)
                };
                let start = Instant::now();
                match plans.wait(&key) {
                    Ok(plan) => {
                        println!("{name} {key} ok {:?} ws {}", start.elapsed(), plan.workspace_bytes())
                    }
                    Err(error) => println!("{name} {error}"),
                }
            }
        }
    }
}
