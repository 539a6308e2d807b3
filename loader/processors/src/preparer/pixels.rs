//! Arranges a microbatch's pixels and mel spectrograms in the format of the model's family.

use dflop_samples::inputs::{AudioFeatures, NamedTensor, PixelValues, TensorValues, VideoValues};
use dflop_samples::media::{Pixel, PixelBuffer};
use half::bf16;

use crate::family::PixelLayout;

/// Creates the tensors for all images, by sample; none without images, and no `pixel_values` if images were
/// only counted.
///
/// - [`PixelLayout::PaddedTiles`]: `pixel_values [images, max tiles, 3, side, side]`,
///   `image_sizes [images, 2]` as height and width, `batch_num_images [samples with images]`
/// - [`PixelLayout::SizedTiles`]: the same without `batch_num_images`
/// - [`PixelLayout::Tiles`] and [`PixelLayout::TypedTiles`]: `pixel_values [tiles, 3, side, side]`
/// - [`PixelLayout::TileRow`]: `pixel_values [1, tiles, 3, side, side]`
/// - [`PixelLayout::PaddedImages`]: `pixel_values [images, 3, max rows, max columns]`,
///   `image_sizes [images, 2]` as height and width
/// - [`PixelLayout::Patches`]: `pixel_values [patches, values]`, `image_grid_thw [images, 3]`
pub(super) fn pixel_tensors(layout: PixelLayout, samples: Vec<Vec<PixelValues>>) -> Vec<NamedTensor> {
    let counts: Vec<i64> =
        samples.iter().map(|images| images.len() as i64).filter(|&images| images > 0).collect();
    let images: Vec<PixelValues> = samples.into_iter().flatten().collect();
    if images.is_empty() {
        return Vec::new();
    }
    let sizes = |name, of: fn(&PixelValues) -> Option<Vec<u32>>, width: usize| {
        let values: Option<Vec<_>> = images.iter().map(of).collect();
        let values = values?.into_iter().flatten().map(i64::from).collect();
        Some(NamedTensor::ints(name, vec![images.len(), width], values))
    };
    let mut tensors = Vec::new();
    match layout {
        PixelLayout::PaddedTiles => {
            tensors.extend(sizes("image_sizes", |image| image.image_size.map(Vec::from), 2));
            tensors.push(NamedTensor::ints("batch_num_images", vec![counts.len()], counts));
        }
        PixelLayout::Patches { .. } => {
            tensors.extend(sizes("image_grid_thw", |image| image.grid_thw.map(Vec::from), 3));
        }
        PixelLayout::SizedTiles | PixelLayout::PaddedImages => {
            tensors.extend(sizes("image_sizes", |image| image.image_size.map(Vec::from), 2));
        }
        PixelLayout::Tiles | PixelLayout::TypedTiles | PixelLayout::TileRow => {}
    }
    if images.iter().all(|image| !image.values.is_empty()) {
        tensors.push(pixel_tensor("pixel_values", layout, images));
    }
    tensors
}

/// Creates the tensors for all videos written as a single medium; none without videos, and no
/// `pixel_values_videos` if videos were only counted.
///
/// - [`PixelLayout::PaddedTiles`]: `pixel_values_videos [videos, max frames, 3, side, side]`, padded with
///   zeros, and `num_video_frames [videos]` if the numbers differ, which the family's Hugging Face processor
///   rejects
/// - [`PixelLayout::Patches`]: `pixel_values_videos [patches, values]`, `video_grid_thw [videos, 3]`, and for
///   Qwen2.5-VL `second_per_grid_ts [videos]`, for Qwen2.5-Omni `video_second_per_grid [videos]`
pub(super) fn video_tensors(layout: PixelLayout, videos: Vec<VideoValues>) -> Vec<NamedTensor> {
    let Some(first) = videos.first() else { return Vec::new() };
    let mut tensors = Vec::new();
    match layout {
        PixelLayout::PaddedTiles if videos.iter().any(|video| video.frames != first.frames) => {
            let frames = videos.iter().map(|video| i64::from(video.frames)).collect();
            tensors.push(NamedTensor::ints("num_video_frames", vec![videos.len()], frames));
        }
        PixelLayout::Patches { time, .. } => {
            let grids: Option<Vec<_>> = videos.iter().map(|video| video.pixels.grid_thw).collect();
            tensors.extend(grids.map(|grids| {
                let grids = grids.into_iter().flatten().map(i64::from).collect();
                NamedTensor::ints("video_grid_thw", vec![videos.len(), 3], grids)
            }));
            if let Some(name) = time.tensor() {
                let seconds = videos.iter().map(|video| video.seconds_per_grid).collect();
                tensors.push(NamedTensor::new(name, vec![videos.len()], TensorValues::F32(seconds)));
            }
        }
        PixelLayout::PaddedTiles
        | PixelLayout::SizedTiles
        | PixelLayout::TileRow
        | PixelLayout::PaddedImages
        | PixelLayout::Tiles
        | PixelLayout::TypedTiles => {}
    }
    if videos.iter().all(|video| !video.pixels.values.is_empty()) {
        let pixels = videos.into_iter().map(|video| video.pixels).collect();
        tensors.push(pixel_tensor("pixel_values_videos", layout, pixels));
    }
    tensors
}

/// Creates a tensor from several images' pixels, with the type of the first image; a processor creates a
/// single type.
fn pixel_tensor(name: &'static str, layout: PixelLayout, images: Vec<PixelValues>) -> NamedTensor {
    match images[0].values {
        PixelBuffer::F32(_) => arranged::<f32>(name, layout, images),
        PixelBuffer::Bf16(_) => arranged::<bf16>(name, layout, images),
        PixelBuffer::U8(_) => arranged::<u8>(name, layout, images),
    }
}

fn arranged<T: Pixel>(name: &'static str, layout: PixelLayout, images: Vec<PixelValues>) -> NamedTensor {
    let (shape, values) = match layout {
        PixelLayout::PaddedTiles | PixelLayout::SizedTiles => padded::<T>(images),
        PixelLayout::PaddedImages => bordered::<T>(images),
        PixelLayout::TileRow => {
            let (mut shape, values) = joined::<T>(images);
            shape.insert(0, 1);
            (shape, values)
        }
        PixelLayout::Tiles | PixelLayout::TypedTiles | PixelLayout::Patches { .. } => joined::<T>(images),
    };
    NamedTensor::new(name, shape, T::buffer(values).into())
}

/// Concatenates images along the first axis.
fn joined<T: Pixel>(images: Vec<PixelValues>) -> (Vec<usize>, Vec<T>) {
    let mut shape = images[0].shape.clone();
    shape[0] = images.iter().map(|image| image.shape[0]).sum();
    let mut images = images.into_iter().filter_map(|image| T::values(image.values));
    let mut values = images.next().unwrap_or_default();
    values.reserve_exact(shape.iter().product::<usize>().saturating_sub(values.len()));
    images.for_each(|image| values.extend(image));
    (shape, values)
}

/// Creates a row for each image or video, padded with zero tiles.
fn padded<T: Pixel>(images: Vec<PixelValues>) -> (Vec<usize>, Vec<T>) {
    let tiles = images.iter().map(|image| image.shape[0]).max().unwrap_or(0);
    let tile_values: usize = images[0].shape[1..].iter().product();
    let mut shape = vec![images.len(), tiles];
    shape.extend(&images[0].shape[1..]);
    let mut values = Vec::with_capacity(images.len() * tiles * tile_values);
    for (row, image) in images.into_iter().enumerate() {
        values.extend(T::values(image.values).unwrap_or_default());
        values.resize((row + 1) * tiles * tile_values, T::default());
    }
    (shape, values)
}

/// Creates a row for each `[3, rows, columns]` image, padded with zeros at the right and the bottom.
fn bordered<T: Pixel>(images: Vec<PixelValues>) -> (Vec<usize>, Vec<T>) {
    let [rows, columns] = [1, 2].map(|axis| images.iter().map(|image| image.shape[axis]).max().unwrap_or(0));
    let shape = vec![images.len(), images[0].shape[0], rows, columns];
    let mut values = vec![T::default(); shape.iter().product()];
    let mut planes = values.chunks_exact_mut((rows * columns).max(1));
    for image in images {
        let own = image.shape;
        let pixels = T::values(image.values).unwrap_or_default();
        for (source, target) in pixels.chunks_exact(own[1] * own[2]).zip(&mut planes) {
            for (from, to) in source.chunks_exact(own[2]).zip(target.chunks_exact_mut(columns)) {
                to[..own[2]].copy_from_slice(from);
            }
        }
    }
    (shape, values)
}

/// Creates `input_features [windows, mels, frames]` and `feature_attention_mask [windows, frames]` from all
/// clips' windows in order; shorter windows are padded.
pub(super) fn feature_tensors(clips: &[&AudioFeatures]) -> Vec<NamedTensor> {
    if clips.is_empty() || clips.iter().any(|clip| clip.values.is_empty()) {
        return Vec::new();
    }
    let mels = clips[0].shape[1];
    let windows: usize = clips.iter().map(|clip| clip.shape[0]).sum();
    let frames = clips.iter().map(|clip| clip.shape[2]).max().unwrap_or(0);
    let mut values = Vec::with_capacity(windows * mels * frames);
    let mut mask = Vec::with_capacity(windows * frames);
    for clip in clips {
        let clip_frames = clip.shape[2].max(1);
        for row in clip.values.chunks(clip_frames) {
            values.extend(row);
            values.resize(values.len() + frames - row.len(), 0.0);
        }
        for window in clip.attention_mask.chunks(clip_frames) {
            mask.extend(window.iter().map(|&is_sound| i64::from(is_sound)));
            mask.resize(mask.len() + frames - window.len(), 0);
        }
    }
    vec![
        NamedTensor::new("input_features", vec![windows, mels, frames], TensorValues::F32(values)),
        NamedTensor::ints("feature_attention_mask", vec![windows, frames], mask),
    ]
}
