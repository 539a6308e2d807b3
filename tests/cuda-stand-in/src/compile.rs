//! Builds the shared libraries, once per set of sources, compiler and processor.

use std::{
    collections::BTreeMap,
    env, fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, OnceLock},
    thread,
};

const COMPILER: &str = "g++";
const FLAGS: [&str; 11] = [
    "-std=c++20",
    "-march=native",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-stack-protector",
    "-U_FORTIFY_SOURCE",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-c",
];

struct Library {
    directory: &'static str,
    file: &'static str,
    /// The name without a version, under which programs may ask for it too.
    unversioned: &'static str,
    links: &'static [&'static str],
    optimization: &'static str,
}

/// Libraries in build order: later libraries link earlier libraries.
const LIBRARIES: [Library; 4] = [
    Library {
        directory: "driver",
        file: "libcuda.so.1",
        unversioned: "libcuda.so",
        links: &[],
        optimization: "-O2",
    },
    Library {
        directory: "nvrtc",
        file: "libnvrtc.so.13",
        unversioned: "libnvrtc.so",
        links: &["libcuda.so.1"],
        optimization: "-O1",
    },
    Library {
        directory: "cublaslt",
        file: "libcublasLt.so.13",
        unversioned: "libcublasLt.so",
        links: &["libcuda.so.1"],
        optimization: "-O3",
    },
    Library {
        directory: "nccl",
        file: "libnccl.so.2",
        unversioned: "libnccl.so",
        links: &["libcuda.so.1"],
        optimization: "-O2",
    },
];

/// Library files, in the order in which a program may load them.
pub(crate) fn library_files() -> impl Iterator<Item = &'static str> {
    LIBRARIES.iter().flat_map(|library| [library.file, library.unversioned])
}

/// Builds the libraries, unless that was done before, and returns their directory.
///
/// The directory is in cargo's target directory and is named after the sources, the compiler and the
/// processor. Processes that request it at once wait for the first. Returns `None`, and writes why to stderr,
/// if this machine has no `g++`.
///
/// # Panics
/// If there is a compiler and the libraries cannot be built.
pub fn library_dir() -> Option<PathBuf> {
    static DIRECTORY: OnceLock<Option<PathBuf>> = OnceLock::new();
    DIRECTORY.get_or_init(find_or_build).clone()
}

fn find_or_build() -> Option<PathBuf> {
    let Some(compiler) = compiler_version() else {
        skip(&format!("no {COMPILER} to build the stand-ins of the CUDA libraries"));
        return None;
    };
    let sources = read_sources().expect("the sources of the stand-ins are readable");
    let mut hasher = DefaultHasher::new();
    let optimizations = LIBRARIES.map(|library| library.optimization);
    (&sources, compiler, processor_features(), FLAGS, optimizations).hash(&mut hasher);
    let parent = target_directory().join("cuda-stand-in");
    let directory = parent.join(format!("{:016x}", hasher.finish()));
    if !directory.exists() {
        fs::create_dir_all(&parent).expect("the target directory is writable");
        build_once(&directory, &parent, &sources);
    }
    Some(directory)
}

/// Reports a test that does not run; not with a macro, because test harnesses capture macro output.
fn skip(reason: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("skipped: {reason}\n").as_bytes());
}

fn compiler_version() -> Option<Vec<u8>> {
    let output = Command::new(COMPILER).arg("--version").output().ok()?;
    output.status.success().then_some(output.stdout)
}

/// What `-march=native` depends on.
fn processor_features() -> Vec<String> {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let names = ["model name", "flags", "Features", "CPU part"];
    text.lines()
        .take_while(|line| !line.is_empty())
        .filter(|line| names.iter().any(|name| line.starts_with(name)))
        .map(str::to_owned)
        .collect()
}

/// Texts by path below `src`.
fn read_sources() -> io::Result<BTreeMap<PathBuf, String>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = BTreeMap::new();
    for directory in LIBRARIES.iter().map(|library| library.directory).chain(["execution"]) {
        for entry in fs::read_dir(root.join(directory))? {
            let path = entry?.path();
            let name = path.strip_prefix(&root).expect("entries lie below their directory").to_owned();
            sources.insert(name, fs::read_to_string(&path)?);
        }
    }
    Ok(sources)
}

/// Cargo's directory with the running program, or the temporary directory.
fn target_directory() -> PathBuf {
    let program = env::current_exe().unwrap_or_default();
    let mut directories = program.ancestors().skip(1);
    let mut profile = directories.next();
    if profile.is_some_and(|directory| directory.ends_with("deps") || directory.ends_with("examples")) {
        profile = directories.next();
    }
    match profile.and_then(Path::parent) {
        Some(target) if target.join("CACHEDIR.TAG").exists() => target.to_owned(),
        _ => env::temp_dir(),
    }
}

fn build_once(directory: &Path, parent: &Path, sources: &BTreeMap<PathBuf, String>) {
    let lock = fs::File::create(parent.join("lock")).expect("the target directory is writable");
    lock.lock().expect("the target directory supports locks");
    if directory.exists() {
        return;
    }
    let building = parent.join(format!("building-{}", std::process::id()));
    fs::create_dir_all(&building).expect("the target directory is writable");
    write_sources(&building, sources).expect("the target directory is writable");
    compile_objects(&building, sources);
    for library in &LIBRARIES {
        link(library, &building, sources);
    }
    fs::rename(&building, directory).expect("the target directory is writable");
}

fn write_sources(building: &Path, sources: &BTreeMap<PathBuf, String>) -> io::Result<()> {
    for (path, text) in sources {
        let path = building.join(path);
        fs::create_dir_all(path.parent().expect("sources lie in directories"))?;
        fs::write(path, text)?;
    }
    Ok(())
}

fn is_code(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "cpp")
}

/// Compiles all files, as many at once as the machine has processors.
fn compile_objects(building: &Path, sources: &BTreeMap<PathBuf, String>) {
    let files = LIBRARIES.iter().flat_map(|library| {
        let paths = sources.keys().filter(|path| path.starts_with(library.directory) && is_code(path));
        paths.map(|path| (building.join(path), library.optimization))
    });
    let queue = Mutex::new(files);
    let next = || queue.lock().expect("no thread panics with the lock").next();
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((path, optimization)) = next() {
                    let mut command = Command::new(COMPILER);
                    run(command.args(FLAGS).arg(optimization).arg(&path).arg("-o").arg(object_path(&path)));
                }
            });
        }
    });
}

fn object_path(source: &Path) -> PathBuf {
    source.with_extension("o")
}

fn link(library: &Library, building: &Path, sources: &BTreeMap<PathBuf, String>) {
    let objects = sources
        .keys()
        .filter(|path| path.starts_with(library.directory) && is_code(path))
        .map(|path| object_path(&building.join(path)));
    let shared = |name: &str| {
        let mut command = Command::new(COMPILER);
        command.args(["-shared", "-pthread", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]);
        command.arg(format!("-Wl,-soname,{name}")).arg("-o").arg(building.join(name));
        command
    };
    run(shared(library.file)
        .args(objects)
        .args(library.links.iter().map(|name| building.join(name)))
        .args(["-ldl", "-Wl,-z,defs"]));
    // An empty library that leads to the other one.
    run(shared(library.unversioned).arg(building.join(library.file)));
}

fn run(command: &mut Command) {
    let output = command.output().expect("the compiler starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} failed:\n{errors}");
}
