//! Builds attention plans for devices that this machine does not have.
#![expect(unsafe_code, reason = "opens the stand-in of the driver")]

use dflop_cuda::cudnn::{DeviceProperties, Heads, Library, Plan, PlanKey};
use std::time::Instant;

#[test]
fn explore() {
    let folder = std::env::var("DFLOP_CUDNN_LIBRARY_DIR").unwrap();
    let _stub =
        unsafe { libloading::os::unix::Library::open(Some(std::env::var("STUB").unwrap()), 0x102) }.unwrap();
    let library = Library::open(Some(std::path::Path::new(&folder))).unwrap();
    println!("{}", library.version());
    for (name, device) in [
        ("H200", DeviceProperties::h200()),
        ("A100", DeviceProperties::a100()),
        ("B200", DeviceProperties::b200()),
    ] {
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
                match Plan::build(&library, &device, &key) {
                    Ok(plan) => {
                        let s = start.elapsed();
                        let json = plan.to_json().unwrap();
                        let start = Instant::now();
                        let again =
                            Plan::from_json(&library, &device, &key, &json).map(|p| p.workspace_bytes());
                        println!(
                            "{name} {key} ok {s:?} ws {} json {} reload {:?} {again:?}",
                            plan.workspace_bytes(),
                            json.len(),
                            start.elapsed()
                        );
                    }
                    Err(error) => println!("{name} {key} {error}"),
                }
            }
        }
    }
}
