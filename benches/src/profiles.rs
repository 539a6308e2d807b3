//! Creates a profile from a formula, as large as a measured profile.

use std::fmt::Write;

use dflop_costmodel::Profile;

/// Batches and lengths for each module.
const GRIDS: [(&str, &[u32], &[u32]); 3] = [
    ("vision", &[1, 2, 4, 8, 16, 32, 64], &[729, 1024]),
    ("audio", &[1, 2, 4, 8, 16, 32, 64], &[1500]),
    ("llm", &[1], &[64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384]),
];

/// Creates a profile for all modules: launch costs, linear work, attention.
///
/// # Panics
/// Never: the text is a profile.
#[must_use]
pub fn formula() -> Profile {
    let mut text = "# dflop-profile: 1\n# device: formula\n\
                    module,part,phase,tp,layers,batch,tokens,microseconds\n"
        .to_owned();
    for (module, batches, lengths) in GRIDS {
        for (batch, tokens) in
            batches.iter().flat_map(|batch| lengths.iter().map(move |tokens| (batch, tokens)))
        {
            let (b, s) = (f64::from(*batch), f64::from(*tokens));
            for (phase, factor) in [("forward", 1.0), ("backward", 2.0)] {
                for (part, layers, microseconds) in [
                    ("linear", 1, 30.0 + 0.05 * b * s),
                    ("linear", 3, 3.0 * (30.0 + 0.05 * b * s)),
                    ("attention", 1, 5.0 + 2e-5 * b * s * s),
                    ("ends", 0, 20.0 + 0.1 * b * s),
                ] {
                    let time = microseconds * factor;
                    // Writing to a string never fails.
                    let _ = writeln!(text, "{module},{part},{phase},1,{layers},{batch},{tokens},{time}");
                }
            }
        }
    }
    Profile::parse([("formula.csv", text.as_str())]).expect("the text is a profile")
}
