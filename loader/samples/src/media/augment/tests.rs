use super::*;
use crate::error::Error;

fn sample(key: &str) -> SampleId<'_> {
    SampleId { shard: "data/shard-000.tar", offset: 512, key }
}

fn all() -> Augment {
    let jitter = ColorJitter { brightness: 0.4, contrast: 0.4, saturation: 0.4, hue: 0.1 };
    let builder = Augment::builder().random_crop(0.08..=1.0, 0.75..=4.0 / 3.0).flip(0.5);
    builder.color_jitter(jitter).seed(11).build().unwrap()
}

const DISPLAYED: ImageSize = ImageSize { width: 400, height: 300 };

fn drawn(augment: &Augment, image: u64) -> ImageChanges {
    augment.image(sample("kite"), 0, &format!("{image}.jpg")).draw(DISPLAYED)
}

#[test]
fn draws_depend_on_everything_that_names_an_image_and_on_nothing_else() {
    let reference = all().image(sample("kite"), 2, "1.jpg").draw(DISPLAYED);
    let elsewhere = SampleId { shard: "s3://bucket/shard-000.tar", ..sample("kite") };
    assert_eq!(all().image(elsewhere, 2, "1.jpg").draw(DISPLAYED), reference);
    let others = [
        all().image(sample("kit"), 2, "1.jpg"),
        all().image(SampleId { offset: 1024, ..sample("kite") }, 2, "1.jpg"),
        all().image(SampleId { shard: "shard-001.tar", ..sample("kite") }, 2, "1.jpg"),
        all().image(sample("kite"), 3, "1.jpg"),
        all().image(sample("kite"), 2, "0.jpg"),
        Augment { seed: Some(12), ..all() }.image(sample("kite"), 2, "1.jpg"),
    ];
    for other in others {
        assert_ne!(other.draw(DISPLAYED), reference);
    }
}

#[test]
fn switching_one_change_off_leaves_the_others() {
    let whole = drawn(&all(), 5);
    let without_crop = drawn(&Augment { crop: None, ..all() }, 5);
    assert_eq!(without_crop, ImageChanges { crop: None, ..whole });
}

/// A resumed run must not change, so the draws must not change between versions either.
#[test]
fn the_draws_of_a_image_never_change() {
    let draw = drawn(&all(), 0);
    assert_eq!(draw.crop, Some(Crop { left: 138, top: 39, width: 215, height: 171 }));
    let flips: Vec<bool> = (0..8).map(|image| drawn(&all(), image).is_flipped).collect();
    assert_eq!(flips, [true, true, true, false, false, true, false, true]);
}

#[test]
fn crops_lie_inside_and_have_the_requested_area_and_ratio() {
    const IMAGES: u64 = 4_000;
    let (mut areas, mut log_ratios, mut flips, mut lefts) = (0.0, 0.0, 0, 0.0);
    // Up to half of the image fits with every ratio, so no attempt is rejected.
    let augment = Augment::builder().random_crop(0.08..=0.5, 0.75..=4.0 / 3.0).flip(0.5).build().unwrap();
    for image in 0..IMAGES {
        let draw = drawn(&augment, image);
        let Crop { left, top, width, height } = draw.crop.unwrap();
        assert!(left + width <= 400 && top + height <= 300 && width > 0 && height > 0);
        let area = f64::from(width * height) / 120_000.0;
        let ratio = f64::from(width) / f64::from(height);
        assert!((0.078..=0.51).contains(&area) && (0.73..=1.36).contains(&ratio), "{area} {ratio}");
        areas += area;
        log_ratios += ratio.ln();
        flips += u32::from(draw.is_flipped);
        lefts += f64::from(left) / f64::from((400 - width).max(1));
    }
    let mean = |sum: f64| sum / IMAGES as f64;
    assert!((mean(areas) - 0.29).abs() < 0.01, "{}", mean(areas));
    assert!(mean(log_ratios).abs() < 0.02, "{}", mean(log_ratios));
    assert!((0.48..0.52).contains(&mean(lefts)), "{}", mean(lefts));
    assert!((1_880..2_120).contains(&flips), "{flips} flips of 4,000 images, expected about half");
}

#[test]
fn an_image_that_no_ratio_fits_is_cut_around_its_center() {
    let augment = Augment::builder().random_crop(1.0..=1.0, 1.0..=1.0).build().unwrap();
    let crop = |width, height| {
        augment
            .image(sample("k"), 0, "0.jpg")
            .draw(ImageSize { width, height })
            .crop
            .map(|crop| [crop.left, crop.top, crop.width, crop.height])
    };
    assert_eq!(crop(900, 300), Some([300, 0, 300, 300]));
    assert_eq!(crop(1, 1), Some([0, 0, 1, 1]));
    assert_eq!(crop(2, 9), Some([0, 3, 2, 2]));
}

/// Encodes the coordinates of each pixel in its values.
fn ramp(width: u32, height: u32) -> RgbImage {
    let pixels = (0..height).flat_map(|y| (0..width).flat_map(move |x| [x as u8, y as u8, 7])).collect();
    RgbImage { width, height, pixels, is_truncated: false }
}

#[test]
fn a_flip_exchanges_left_and_right_and_nothing_else() {
    let flip = Augment::builder().flip(1.0).build().unwrap();
    let flipped = flip.image(sample("k"), 0, "0.jpg").apply(&ramp(20, 6), 20, 6).unwrap();
    for (y, row) in flipped.pixels.as_chunks::<3>().0.chunks(20).enumerate() {
        for (x, pixel) in row.iter().enumerate() {
            assert_eq!(*pixel, [19 - x as u8, y as u8, 7]);
        }
    }
}

#[test]
fn a_crop_shows_the_part_that_was_drawn() {
    let augment = Augment::builder().random_crop(0.3..=0.3, 1.0..=1.0).seed(3).build().unwrap();
    let image = augment.image(sample("k"), 0, "0.jpg");
    let Crop { left, top, width, height } = image.draw(ImageSize { width: 100, height: 100 }).crop.unwrap();
    let cut = image.apply(&ramp(100, 100), width, height).unwrap();
    let (first, last) = (&cut.pixels[..2], &cut.pixels[cut.pixels.len() - 3..][..2]);
    assert_eq!(first, [left as u8, top as u8]);
    assert_eq!(last, [(left + width - 1) as u8, (top + height - 1) as u8]);
}

#[test]
fn ranges_that_make_no_sense_are_refused() {
    let message = |builder: AugmentBuilder| match builder.build() {
        Err(Error::Config { setting, reason }) => format!("{setting}: {reason}"),
        other => panic!("{other:?}"),
    };
    let new = Augment::builder;
    assert!(message(new().random_crop(0.0..=1.0, 1.0..=1.0)).contains("scale"));
    assert!(message(new().random_crop(0.5..=1.5, 1.0..=1.0)).contains("scale"));
    assert!(message(new().random_crop(0.5..=1.0, 2.0..=1.0)).contains("ratio"));
    assert!(message(new().random_crop(f64::NAN..=1.0, 1.0..=1.0)).contains("scale"));
    assert!(message(new().flip(1.1)).contains("flip"));
    assert!(message(new().color_jitter(ColorJitter { hue: 0.6, ..ColorJitter::default() })).contains("hue"));
    let dark = ColorJitter { brightness: -0.1, ..ColorJitter::default() };
    assert!(message(new().color_jitter(dark)).contains("at least 0"));
}

const RED: [u8; 3] = [255, 0, 0];
const PLAIN: ColorChanges = ColorChanges { brightness: 1.0, contrast: 1.0, saturation: 1.0, hue_turns: 0.0 };

fn changed(colors: ColorChanges, mut pixels: Vec<[u8; 3]>) -> Vec<[u8; 3]> {
    colors.apply(&mut pixels);
    pixels
}

#[test]
fn brightness_multiplies_and_stops_at_white() {
    let colors = ColorChanges { brightness: 1.5, ..PLAIN };
    assert_eq!(changed(colors, vec![[10, 100, 200]]), [[15, 150, 255]]);
}

#[test]
fn contrast_is_about_the_mean_gray() {
    let flat = changed(ColorChanges { contrast: 0.0, ..PLAIN }, vec![[0; 3], [100; 3]]);
    assert_eq!(flat, [[50; 3]; 2]);
    let steep = changed(ColorChanges { contrast: 2.0, ..PLAIN }, vec![[40; 3], [60; 3]]);
    assert_eq!(steep, [[30; 3], [70; 3]]);
}

#[test]
fn saturation_is_about_the_gray_of_the_pixel() {
    assert_eq!(changed(ColorChanges { saturation: 0.0, ..PLAIN }, vec![RED, [9; 3]]), [[76; 3], [9; 3]]);
}

#[test]
fn hue_turns_red_to_green_to_blue_and_back() {
    let turned = |turns| changed(ColorChanges { hue_turns: turns, ..PLAIN }, vec![RED])[0];
    assert_eq!(turned(1.0 / 3.0), [0, 255, 0]);
    assert_eq!(turned(-1.0 / 3.0), [0, 0, 255]);
    assert_eq!(turned(0.5), [0, 255, 255]);
    let muted = changed(ColorChanges { hue_turns: 0.25, ..PLAIN }, vec![[40, 60, 50]])[0];
    assert_eq!((*muted.iter().max().unwrap(), *muted.iter().min().unwrap()), (60, 40));
}

#[test]
fn no_change_keeps_every_value() {
    let all: Vec<[u8; 3]> = (0..=255).map(|value| [value, 255 - value, value / 2]).collect();
    assert_eq!(changed(PLAIN, all.clone()), all);
    let nearly = ColorChanges { hue_turns: 1e-9, ..PLAIN };
    assert_eq!(changed(nearly, all.clone()), all);
}
