//! Failures of the CUDA device: each is a typed error that names the expected state, and none ends the
//! process.

use std::path::{Path, PathBuf};
use std::process::Command;

use dflop_cuda::{Cuda, CudaBuilder, Error, SearchPath};
use dflop_cuda_tests::cuda::{stand_in, turn, with_storage};
use dflop_device::ops::elementwise::Elementwise;
use dflop_device::{Dtype, Runtime};

/// Runs a test in a separate process, where no library is open yet; returns whether this is that process.
fn is_alone(test: &str) -> bool {
    const ALONE: &str = "DFLOP_CUDA_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", test]).env(ALONE, "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    false
}

/// Device settings with libraries searched only in these directories.
fn builder(directories: &[&Path]) -> CudaBuilder {
    let search = SearchPath::only(directories.iter().map(|path| path.to_path_buf()).collect());
    Cuda::builder(0).search_path(search).kernel_cache(None)
}

fn error(builder: CudaBuilder) -> Error {
    builder.build().err().expect("the device cannot be opened")
}

fn libraries() -> PathBuf {
    let _ = stand_in();
    dflop_cuda_stand_in::library_dir().expect("the stand-in is there")
}

/// Creates a directory with these stand-in libraries.
fn directory_with(names: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for name in names {
        std::fs::copy(libraries().join(name), directory.path().join(name)).unwrap();
    }
    directory
}

#[test]
fn a_missing_library_is_named_with_the_places_that_were_searched() {
    if !is_alone("failures::a_missing_library_is_named_with_the_places_that_were_searched") {
        return;
    }
    let empty = tempfile::tempdir().unwrap();
    let message = error(builder(&[empty.path()])).to_string();
    assert!(message.contains("could not find the CUDA driver"), "{message}");
    assert!(message.contains(&empty.path().join("libcuda.so.1").display().to_string()), "{message}");
    let driver = directory_with(&["libcuda.so.1"]);
    let message = error(builder(&[driver.path()])).to_string();
    assert!(message.contains("could not find NVRTC"), "{message}");
    assert!(message.contains("libnvrtc.so.13") && message.contains("libnvrtc.so.12"), "{message}");
    assert!(message.contains("nvidia-cuda-nvrtc"), "{message}");
    let without_blas = directory_with(&["libcuda.so.1", "libnvrtc.so.13"]);
    let message = error(builder(&[without_blas.path()])).to_string();
    assert!(message.contains("could not find cuBLASLt"), "{message}");
}

#[test]
fn a_broken_library_is_named() {
    if !is_alone("failures::a_broken_library_is_named") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("libcuda.so.1"), b"no library").unwrap();
    let error = error(builder(&[directory.path()]));
    assert!(
        matches!(&error, Error::LibraryUnusable { path, .. } if path.ends_with("libcuda.so.1")),
        "{error}"
    );
}

#[test]
fn an_old_library_lacks_a_function() {
    if !is_alone("failures::an_old_library_lacks_a_function") {
        return;
    }
    // a library without any function
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("libcuda.so.1");
    let built = Command::new("cc").args(["-shared", "-x", "c", "/dev/null", "-o"]).arg(&path).status();
    assert!(built.unwrap().success());
    let message = error(builder(&[directory.path()])).to_string();
    assert!(message.contains("it has no function cuInit"), "{message}");
}

#[test]
fn no_device_and_an_old_device_are_typed() {
    let _turn = turn();
    let libraries = libraries();
    let absent = Cuda::builder(7).search_path(SearchPath::only(vec![libraries.clone()]));
    let found = error(absent.kernel_cache(None));
    assert!(matches!(found, Error::NoDevice { ordinal: 7, .. }), "{found}");
    stand_in().set_compute_capability(75);
    let found = error(builder(&[&libraries]));
    assert!(matches!(found, Error::DeviceTooOld { major: 7, minor: 5, .. }), "{found}");
    stand_in().reset();
    stand_in().set_driver_version(12_040);
    let message = error(builder(&[&libraries])).to_string();
    assert!(message.contains("version 13.0") && message.contains("12.4"), "{message}");
}

#[test]
fn other_types_of_storage_are_refused() {
    let _turn = turn();
    let found = error(builder(&[&libraries()]).storage(Dtype::U32));
    assert!(matches!(found, Error::InvalidSetting { setting: "storage", .. }), "{found}");
}

#[test]
fn memory_has_the_limit_of_the_setting_and_that_of_the_device() {
    let _turn = turn();
    let device = builder(&[&libraries()]).memory_limit(1 << 20).build().unwrap();
    let kept = device.zeros_as(Dtype::F32, 1 << 17).unwrap();
    let found = device.zeros_as(Dtype::F32, 1 << 18).err().unwrap();
    let dflop_device::Error::OutOfMemory { bytes, used, .. } = found else { panic!("{found}") };
    assert_eq!((bytes, used), (1 << 20, 1 << 19));
    drop(kept);
    assert_eq!(device.memory_used_bytes(), 0);
    drop(device.zeros_as(Dtype::F32, 1 << 18).unwrap());
    stand_in().set_bytes_max(1 << 19);
    let device = builder(&[&libraries()]).build().unwrap();
    let found = device.zeros_as(Dtype::F32, 1 << 18).err().unwrap();
    assert!(matches!(found, dflop_device::Error::OutOfMemory { .. }), "{found}");
    assert_eq!(device.memory_used_bytes(), 0);
    // a later, smaller allocation works
    drop(device.zeros_as(Dtype::F32, 1 << 10).unwrap());
}

#[test]
fn a_kernel_that_fails_ends_the_device_and_not_the_process() {
    let _turn = turn();
    let device = with_storage(Dtype::F32);
    let x = device.upload(&[1.0; 100]).unwrap();
    let mut y = device.upload(&[1.0; 100]).unwrap();
    stand_in().fail_launch("add", 1);
    // the launch returns at once, and the failure comes when the device is waited for
    device.add(&x, &mut y).unwrap();
    for _ in 0..2 {
        let found = device.download(&y).err().unwrap();
        let dflop_device::Error::Failed { reason } = found else { panic!("{found}") };
        assert!(reason.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{reason}");
    }
}

#[test]
fn a_kernel_that_does_not_compile_names_its_file() {
    let _turn = turn();
    let device = builder(&[&libraries()]).storage(Dtype::F32).build().unwrap();
    let mut y = device.upload(&[1.0; 100]).unwrap();
    stand_in().set_compilation_fails(true);
    let found = device.scale(2.0, &mut y).err().unwrap().to_string();
    assert!(found.contains("could not compile elementwise.cu"), "{found}");
    stand_in().set_compilation_fails(false);
    device.scale(2.0, &mut y).unwrap();
    assert!((device.download(&y).unwrap()[99] - 2.0).abs() < 1e-6);
}

#[test]
fn a_library_is_found_by_the_loader_and_by_its_own_variable() {
    let _turn = turn();
    let test = std::env::current_exe().unwrap();
    for variable in ["LD_LIBRARY_PATH", dflop_cuda::LIBRARY_PATH] {
        let mut command = Command::new(&test);
        command
            .args(["--ignored", "--exact", "failures::opens_by_the_environment"])
            .env(variable, libraries());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{variable}: {}", String::from_utf8_lossy(&output.stdout));
    }
}

/// Part of the test above, which runs it in separate processes.
#[test]
#[ignore = "runs with an environment of its own"]
fn opens_by_the_environment() {
    let device = Cuda::builder(0).kernel_cache(None).build().unwrap();
    assert!(device.properties().name.contains("stand-in"), "{:?}", device.properties());
}
