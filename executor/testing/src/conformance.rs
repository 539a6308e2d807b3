//! Conformance suite for tensor communicators, over threads and TCP.

use std::sync::Arc;

use dflop_device::conformance::cases;

use crate::claim::Claim;
use crate::device::TestBackend;
use crate::support::{ALL, patient, run};

/// Lists the suite cases as claims.
pub fn claims<B: TestBackend>() -> Vec<Claim> {
    let claim = |name: &'static str| Claim::new(module_path!(), name, move || conforms::<B>(name));
    cases::<B::Device>().into_iter().map(|case| claim(case.name)).collect()
}

/// Runs a suite case over both transports, on all group sizes in the case.
fn conforms<B: TestBackend>(name: &str) {
    let all = cases::<B::Device>();
    let case = all.iter().find(|case| case.name == name).expect("a case of the suite");
    for transport in ALL {
        for &size in case.sizes {
            run(transport, size, patient(), |comm| {
                let device = B::open(1);
                let comm = B::tensors(&device, Arc::new(comm)).unwrap();
                case.run(&device, &*comm);
            });
        }
    }
}
