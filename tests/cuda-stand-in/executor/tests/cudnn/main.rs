//! Builds attention plans for devices that this machine does not have.
//!
//! The tests need the libraries of cuDNN, cuBLAS and NVRTC, but no device; `driver.rs` says where they are
//! found.

mod driver;
mod shapes;

use std::fmt::Write as _;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use dflop_cuda::cudnn::{
    DeviceProperties, Error, Executor, Form, Heads, Library, Lookup, Plan, PlanKey, Plans, Version,
};
use shapes::SHAPES;

/// Maximum workspace bytes for a forward plan.
const FORWARD_BYTES_MAX: u64 = 1 << 20;
const MB: u64 = 1_000_000;

fn devices() -> [(&'static str, DeviceProperties); 3] {
    [
        ("H200", DeviceProperties::h200()),
        ("A100", DeviceProperties::a100()),
        ("B200", DeviceProperties::b200()),
    ]
}

#[expect(clippy::print_stdout, reason = "the table is what the test is run for")]
#[test]
fn every_shape_has_plans_on_every_device() {
    let Some(library) = driver::library() else { return };
    let mut too_much = false;
    let mut table = format!("cuDNN {}\n", library.version());
    for (device, properties) in devices() {
        for shape in &SHAPES {
            for key in [shape.forward(), shape.backward(false)] {
                let start = Instant::now();
                let plan = Plan::build(&library, &properties, &key).expect("a plan");
                let (seconds, bytes) = (start.elapsed().as_secs_f64(), plan.workspace_bytes());
                let (packed, padded) = shape.backward_mb_max;
                let bytes_max = match (key.is_backward, plan.form()) {
                    (false, _) => FORWARD_BYTES_MAX,
                    (true, Form::Padded) => padded * MB,
                    (true, _) => packed * MB,
                };
                let form = plan.form();
                writeln!(table, "{device} {}: {key} {form:?} {seconds:.1} s, {bytes} bytes", shape.name)
                    .unwrap();
                too_much |= bytes > bytes_max;
            }
        }
    }
    println!("{table}");
    assert!(!too_much, "a workspace is larger than its bound");
}

#[test]
fn heads_of_96_columns_have_plans() {
    let Some(library) = driver::library() else { return };
    let heads = Heads { heads: 32, kv_heads: 32, head_dim: 96, is_causal: true };
    let starts = [0, 700, 4000];
    for (device, properties) in devices() {
        for key in [PlanKey::forward(heads, &starts), PlanKey::backward(heads, &starts, false)] {
            let plan = Plan::build(&library, &properties, &key);
            assert!(plan.is_ok(), "{device} {key}");
        }
    }
}

#[test]
fn the_single_backward_graph_has_plans_from_9_28_on() {
    let Some(library) = driver::library() else { return };
    for shape in &SHAPES {
        for properties in [DeviceProperties::h200(), DeviceProperties::b200()] {
            let plan = Plan::build_form(&library, &properties, &shape.backward(false), Form::Single);
            assert_eq!(plan.is_ok(), library.version() >= Version(92_800), "{}", shape.name);
        }
    }
}

#[expect(clippy::print_stdout, reason = "the table is what the test is run for")]
#[test]
fn plans_with_a_fixed_order_exist_on_hopper_and_blackwell() {
    let Some(library) = driver::library() else { return };
    for (device, properties) in devices() {
        for shape in &SHAPES {
            let key = shape.backward(true);
            match Plan::build(&library, &properties, &key) {
                Ok(plan) => println!("{device} {key}: {:?}, {} bytes", plan.form(), plan.workspace_bytes()),
                Err(error) => {
                    assert!(device == "A100" && matches!(error, Error::NoPlan { .. }), "{device} {error}");
                }
            }
        }
    }
}

#[test]
fn the_engine_of_a_fixed_order_has_its_settings() {
    let Some(library) = driver::library() else { return };
    let directory = tempfile::tempdir().expect("a temporary directory");
    let key = SHAPES[3].backward(true);
    plans(&library, directory.path()).wait(&key).expect("a plan");
    let text = fs::read_to_string(file(directory.path(), &key)).unwrap();
    let is_set = text.contains("CUDNN_KNOB_TYPE_STAGES\\\":4");
    assert_eq!(is_set, library.version() >= Version(92_500), "else the graph itself has a fixed order");
}

/// The only file for a key below a directory.
fn file(directory: &Path, key: &PlanKey) -> PathBuf {
    let directories = fs::read_dir(directory).expect("the directory of plans");
    let mut files =
        directories.map(|directory| directory.expect("a directory").path().join(format!("{key}.json")));
    let file = files.next().expect("the directory of a version and device");
    assert!(files.next().is_none());
    file
}

fn plans(library: &Arc<Library>, directory: &Path) -> Plans {
    let plans_max = NonZeroUsize::new(8).expect("not zero");
    Plans::new(library, DeviceProperties::h200(), Some(directory), plans_max).expect("plans")
}

#[test]
fn equal_devices_share_their_plans() {
    let Some(library) = driver::library() else { return };
    let directory = tempfile::tempdir().expect("a temporary directory");
    let key = SHAPES[3].forward();
    plans(&library, directory.path()).wait(&key).expect("a plan");
    let json = DeviceProperties::h200().to_json();
    let other = json
        .replace("\"pciDeviceId\":0", "\"pciDeviceId\":7")
        .replace("\"cudaDeviceId\":0", "\"cudaDeviceId\":1");
    assert_ne!(json, other);
    let written = fs::metadata(file(directory.path(), &key)).unwrap().modified().unwrap();
    let properties = DeviceProperties::from_json(&other).expect("properties");
    let others = Plans::new(&library, properties, Some(directory.path()), NonZeroUsize::MIN).expect("plans");
    others.wait(&key).expect("a plan");
    assert_eq!(
        fs::metadata(file(directory.path(), &key)).unwrap().modified().unwrap(),
        written,
        "not built again"
    );
}

#[test]
fn plans_are_read_again_and_damaged_ones_are_built_again() {
    let Some(library) = driver::library() else { return };
    let directory = tempfile::tempdir().expect("a temporary directory");
    for key in [SHAPES[3].forward(), SHAPES[3].backward(false)] {
        let first = plans(&library, directory.path());
        assert!(matches!(first.get(&key), Lookup::Building));
        let built = first.wait(&key).expect("a plan");
        assert!(matches!(first.get(&key), Lookup::Ready(_)));

        let file = file(directory.path(), &key);
        let (text, written) = (fs::read_to_string(&file).unwrap(), fs::metadata(&file).unwrap().modified());
        let read = plans(&library, directory.path()).wait(&key).expect("a plan");
        assert_eq!(read.workspace_bytes(), built.workspace_bytes());
        assert_eq!(read.form(), built.form());
        assert_eq!(fs::metadata(&file).unwrap().modified().unwrap(), written.unwrap(), "not built again");

        // The number within the plan itself; cuDNN rejects a wrong number.
        let version = format!("cudnnVersion\\\":{}", library.version().0);
        assert!(text.contains(&version), "{}", &text[..300]);
        let other = text.replace(&version, "cudnnVersion\\\":91300");
        for damaged in [other.as_str(), &text[..text.len() / 2], "", "{}"] {
            fs::write(&file, damaged).unwrap();
            let again = plans(&library, directory.path()).wait(&key).expect("a plan");
            assert_eq!(again.workspace_bytes(), built.workspace_bytes());
            assert_ne!(fs::read_to_string(&file).unwrap(), damaged, "written again");
        }
    }
}

#[test]
fn without_a_device_nothing_can_run() {
    let Some(library) = driver::library() else { return };
    assert!(matches!(Executor::new(&library), Err(Error::Refused { call: "cudnnCreate", .. })));
    assert!(DeviceProperties::from_device(&library, 0).is_err());
}

#[test]
fn errors_name_the_file_that_was_tried() {
    let directory = Path::new("/nowhere");
    let error = Library::open(Some(directory)).expect_err("no library");
    assert!(error.to_string().contains("/nowhere/libcudnn.so.9"), "{error}");
}
