//! Prints the predicted cost of three samples: a caption, a document page and a video with speech.
#![expect(clippy::print_stdout, reason = "an example shows its result")]

use dflop_costmodel::{AudioLength, CostModel, DeviceRate, ImageSize, ModelSpec, SampleShape, VideoShape};

fn main() -> dflop_costmodel::Result<()> {
    let model = CostModel::new(ModelSpec::preset("omni-7b")?, DeviceRate::preset("h100")?);
    let caption = SampleShape { text_tokens: 50, target_tokens: 30, ..SampleShape::default() };
    let page = SampleShape { images: vec![ImageSize { width: 2480, height: 3508 }], ..caption.clone() };
    let video = SampleShape {
        videos: vec![VideoShape { frames: 32, width: 640, height: 480 }],
        audio: vec![AudioLength { frames: 45 * 16_000, sample_rate_hz: 16_000 }],
        ..caption.clone()
    };
    for (name, shape) in [("caption", caption), ("page", page), ("video", video)] {
        let cost = model.predict(&shape)?;
        println!("{name}: {} encoder items, {} tokens", cost.encoder_items, cost.tokens);
        for (module, ns) in model.modules().iter().zip(cost.module_ns.as_slice()) {
            println!("  {module:<6} {:>9.3} ms", *ns as f64 / 1e6);
        }
    }
    Ok(())
}
