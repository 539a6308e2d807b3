//! Converts names, paths and constructor arguments from Python, and delivered samples to the classes in
//! `dflop.batches`.

use super::arrays::array::{Array, numpy_from_stored};
use super::arrays::framework::Framework;
use super::arrays::storage::Owner;
use super::error::to_python;
use dflop_loader::decode::Batch;
use dflop_loader::error::excerpt;
use dflop_loader::inputs::{NamedTensor, TensorValues};
use dflop_loader::media::{Audio, Media, NpyArray, PixelLayout, RgbImage, Video};
use dflop_loader::sample::{Field, Sample};
use dflop_loader::store::redact;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyModule, PyString, PyType};
use std::path::PathBuf;

/// Extensions for numbers in the `WebDataset` convention: a class, a count, an index.
const NUMBERS: [&str; 7] = ["cls", "cls2", "class", "count", "index", "inx", "id"];

/// Form of delivered values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Delivery {
    pub(crate) framework: Framework,
    /// Whether fields are decoded; otherwise they are delivered as stored.
    pub(crate) is_decoded: bool,
}

impl Delivery {
    pub(crate) fn new(framework: Framework, decode: &str) -> Self {
        Self { framework, is_decoded: decode != "raw" }
    }

    pub(crate) fn resolved(self, py: Python<'_>) -> PyResult<Self> {
        Ok(Self { framework: self.framework.resolved(py)?, ..self })
    }
}

/// Returns a class in `dflop.batches`.
pub(crate) fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    static BATCHES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    BATCHES.get_or_try_init(py, || py.import("dflop.batches").map(Bound::unbind))?.bind(py).getattr(name)
}

/// Converts a batch with all samples.
pub(crate) fn batch(py: Python<'_>, of: Batch, delivery: Delivery) -> PyResult<Bound<'_, PyAny>> {
    // Resolved once, so that all arrays in a batch come from the same library.
    let delivery = delivery.resolved(py)?;
    let batch = class(py, "Batch")?.call0()?;
    let image_rows = PyList::empty(py);
    if let Some(pixels) = of.pixels {
        let side = pixels.side as usize;
        let rows = pixels.tensor.rows();
        let shape = match pixels.layout {
            PixelLayout::ChannelsFirst => [rows, 3, side, side],
            PixelLayout::ChannelsLast => [rows, side, side, 3],
        };
        batch.set_item("image", delivery.framework.array(py, Owner::Pixels(pixels.tensor), &shape)?)?;
        for range in pixels.rows {
            image_rows.append((range.start, range.end))?;
        }
    }
    batch.setattr("sources", of.sources.iter().map(|name| &**name).collect::<Vec<&str>>())?;
    let samples = samples(py, of.samples, delivery)?;
    for (place, sample) in samples.iter().enumerate() {
        for extension in sample.try_iter()? {
            let extension = extension?;
            // A field that some samples lack becomes a list with `None` for these samples.
            if !batch.contains(&extension)? {
                batch.set_item(&extension, PyList::new(py, vec![None::<bool>; samples.len()])?)?;
            }
            batch.get_item(&extension)?.set_item(place, sample.get_item(&extension)?)?;
        }
    }
    batch.setattr("samples", samples)?;
    batch.setattr("image_rows", image_rows)?;
    Ok(batch)
}

/// Converts samples, in order.
pub(crate) fn samples(py: Python<'_>, of: Vec<Sample>, delivery: Delivery) -> PyResult<Bound<'_, PyList>> {
    let class = class(py, "Sample")?;
    let list = PyList::empty(py);
    for sample in of {
        let made = class.call0()?;
        for Field { extension, media } in sample.fields {
            let value = match (&media, delivery.is_decoded) {
                (Media::Opaque(stored), true) => number(&extension, stored),
                _ => None,
            };
            match value {
                Some(number) => made.set_item(&*extension, number)?,
                None => made.set_item(&*extension, self::media(py, media, delivery.framework)?)?,
            }
        }
        made.setattr("key", sample.key)?;
        made.setattr("shard", &*sample.shard)?;
        made.setattr("offset", sample.offset)?;
        made.setattr("epoch", sample.epoch)?;
        made.setattr("bytes", sample.bytes)?;
        list.append(made)?;
    }
    Ok(list)
}

/// Parses the number that a field holds by convention.
fn number(extension: &str, stored: &[u8]) -> Option<i64> {
    let kind = extension.rsplit('.').next()?;
    std::str::from_utf8(stored).ok().filter(|_| NUMBERS.contains(&kind))?.trim().parse().ok()
}

/// Converts a field value.
pub(crate) fn media(py: Python<'_>, media: Media, framework: Framework) -> PyResult<Bound<'_, PyAny>> {
    match media {
        Media::Image(RgbImage { width, height, pixels, .. }) => {
            framework.array(py, Owner::U8(pixels), &[height as usize, width as usize, 3])
        }
        Media::Audio(audio) => clip(py, audio, framework),
        Media::Video(video) => frames(py, video, framework),
        Media::Text(text) => Ok(PyString::new(py, &text).into_any()),
        Media::Json(value) => to_python(py, &value),
        Media::Npy(NpyArray { dtype, shape, is_fortran_order, data, .. }) => {
            framework.convert_numpy(numpy_from_stored(py, data, &dtype, &shape, is_fortran_order)?)
        }
        // User code returned a Python object, which is delivered unchanged.
        Media::Custom(custom) => {
            Ok(custom.value::<Py<PyAny>>().map_or_else(|| py.None(), |it| it.clone_ref(py)).into_bound(py))
        }
        Media::Opaque(stored) => Ok(Bound::new(py, Array::stored(stored))?.into_any()),
    }
}

fn clip(py: Python<'_>, audio: Audio, framework: Framework) -> PyResult<Bound<'_, PyAny>> {
    let (frames, channels) = (audio.frames(), usize::from(audio.channels));
    let samples = framework.array(py, Owner::F32(audio.samples), &[frames, channels])?;
    class(py, "Audio")?.call1((samples, audio.sample_rate_hz, audio.is_truncated))
}

fn frames(py: Python<'_>, video: Video, framework: Framework) -> PyResult<Bound<'_, PyAny>> {
    let Video { width, height, times_seconds, frames_per_second, pixels, .. } = video;
    let shape = [times_seconds.len(), height as usize, width as usize, 3];
    let frames = framework.array(py, Owner::U8(pixels), &shape)?;
    let times = framework.array(py, Owner::F64(times_seconds), &shape[..1])?;
    class(py, "Video")?.call1((frames, times, frames_per_second))
}

/// Puts tensors into a mapping by name.
pub(crate) fn tensors(
    mapping: &Bound<'_, PyAny>,
    of: Vec<NamedTensor>,
    framework: Framework,
) -> PyResult<()> {
    for NamedTensor { name, shape, values } in of {
        let owner = match values {
            TensorValues::I64(values) => Owner::I64(values),
            TensorValues::F32(values) => Owner::F32(values),
            TensorValues::Bf16(values) => Owner::Bf16(values),
            TensorValues::U8(values) => Owner::U8(values),
        };
        mapping.set_item(name, framework.array(mapping.py(), owner, &shape)?)?;
    }
    Ok(())
}

/// Converts skipped samples to a list of dictionaries.
pub(crate) fn skipped<'py>(
    py: Python<'py>,
    of: &[dflop_loader::error::Skipped],
) -> PyResult<Bound<'py, PyAny>> {
    to_python(py, &of)
}

/// Converts a state through JSON, so that it compares equal after a round trip through a file.
pub(crate) fn json<'py>(py: Python<'py>, value: &impl serde::Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).map_err(|error| PyValueError::new_err(error.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}

/// Converts a user dictionary to JSON text.
pub(crate) fn json_text(value: &Bound<'_, PyAny>) -> PyResult<String> {
    let arguments = PyDict::new(value.py());
    arguments.set_item("allow_nan", false)?;
    value.py().import("json")?.getattr("dumps")?.call((value,), Some(&arguments))?.extract()
}

/// Names or paths, from a single value or a list; also names of models and fields.
pub(crate) struct Names(pub(crate) Vec<String>);

impl<'py> FromPyObject<'_, 'py> for Names {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Some(name) = name(&value)? {
            return Ok(Self(vec![name]));
        }
        let each = |item: PyResult<Bound<'py, PyAny>>| {
            let item = item?;
            name(&item)?.ok_or_else(|| not_a_name(&item))
        };
        value.try_iter().map_err(|_| not_a_name(&value))?.map(each).collect::<PyResult<_>>().map(Self)
    }
}

/// Returns text, a path as text, or a `dflop.ModelDescription` as JSON; `None` for anything else.
fn name(value: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    if value.is_instance_of::<PyString>() {
        return value.extract().map(Some);
    }
    let description = value.py().import("dflop.custom")?.getattr("ModelDescription")?;
    if value.is_instance(&description)? {
        return value.call_method0("to_json")?.extract().map(Some);
    }
    Ok(value.extract::<PathBuf>().ok().map(|path| path.display().to_string()))
}

fn not_a_name(value: &Bound<'_, PyAny>) -> PyErr {
    let kind = value.get_type().name().map_or_else(|_| "this".to_owned(), |name| name.to_string());
    PyTypeError::new_err(format!("expected a name, a path, or a list of them, found {kind}"))
}

/// Maximum number of characters per argument in a `repr`.
const CHARACTERS_MAX: usize = 80;

/// Constructor arguments, by name.
#[derive(Debug)]
pub(crate) struct Arguments(Py<PyDict>);

impl Arguments {
    /// Keeps a dictionary of all arguments.
    pub(crate) fn new(arguments: Bound<'_, PyDict>) -> Self {
        Self(arguments.unbind())
    }

    /// Returns the dictionary.
    pub(crate) fn dict<'py>(&self, py: Python<'py>) -> &Bound<'py, PyDict> {
        self.0.bind(py)
    }

    /// Returns another reference to the same arguments.
    pub(crate) fn clone_ref(&self, py: Python<'_>) -> Self {
        Self(self.0.clone_ref(py))
    }

    /// Removes arguments that are `None`.
    pub(crate) fn without_none(self, py: Python<'_>) -> PyResult<Self> {
        let arguments = self.0.bind(py);
        for (name, value) in arguments.copy()? {
            if value.is_none() {
                arguments.del_item(name)?;
            }
        }
        Ok(self)
    }

    /// Returns a function without arguments that creates the object again.
    pub(crate) fn constructor<'py>(&self, class: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = class.py();
        py.import("functools")?.getattr("partial")?.call((class,), Some(self.0.bind(py)))
    }

    /// Formats the constructor call, without arguments that have the default value.
    pub(crate) fn repr(&self, class: &Bound<'_, PyType>) -> PyResult<String> {
        Ok(format!("{}({})", class.name()?, self.shown(class)?.join(", ")))
    }

    /// Formats the arguments that do not have the default value, without credentials in URLs.
    pub(crate) fn shown(&self, class: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
        let py = class.py();
        let inspect = py.import("inspect")?;
        let keyword_only = inspect.getattr("Parameter")?.getattr("KEYWORD_ONLY")?;
        let parameters = inspect.call_method1("signature", (class,))?.getattr("parameters")?;
        let mut shown = Vec::new();
        for item in parameters.call_method0("items")?.try_iter()? {
            let (name, parameter): (String, Bound<'_, PyAny>) = item?.extract()?;
            let Some(value) = self.0.bind(py).get_item(&name)? else { continue };
            let default = parameter.getattr("default")?;
            // A required parameter has a default that no value equals.
            if value.eq(&default).unwrap_or(false) {
                continue;
            }
            let text = value.repr()?.to_string();
            let text = excerpt(&redact(&text), CHARACTERS_MAX).into_owned();
            let is_named = !shown.is_empty() || parameter.getattr("kind")?.is(&keyword_only);
            shown.push(if is_named { format!("{name}={text}") } else { text });
        }
        Ok(shown)
    }
}

/// Collects variables by name to [`Arguments`].
macro_rules! arguments {
    ($py:expr, $($name:ident),+ $(,)?) => {{
        let arguments = pyo3::types::PyDict::new($py);
        $(arguments.set_item(stringify!($name), &$name)?;)+
        $crate::convert::Arguments::new(arguments)
    }};
}

pub(crate) use arguments;
