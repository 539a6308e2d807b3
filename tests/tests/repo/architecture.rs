//! Holds the invariants in ARCHITECTURE.md: dependencies, file lengths, unsafe code, purity.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::source::{kernel_files, root, rust_files, shown};

/// Returns the names of the workspace packages that a package needs, itself left out.
fn workspace_dependencies(package: &str) -> Vec<String> {
    let output = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--offline",
            "--prefix",
            "none",
            "--edges",
            "normal",
            "--format",
            "{p}",
            "-p",
            package,
        ])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut names: Vec<String> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| name.starts_with("dflop-") && *name != package)
        .map(str::to_owned)
        .collect();
    names.sort();
    names.dedup();
    names
}

#[test]
fn workflows_pin_actions_to_commits_and_limit_their_permissions() {
    let mut pinned = 0;
    for file in std::fs::read_dir(root().join(".github/workflows")).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains("\npermissions:\n  contents: read\n"), "{}: permissions", shown(&path));
        for (_, action) in text.lines().filter_map(|line| line.split_once("uses: ")) {
            let is_digest =
                |commit: &str| commit.len() == 40 && commit.chars().all(|digit| digit.is_ascii_hexdigit());
            let commit = action.split_once('@').map(|(_, rest)| rest.split(' ').next().unwrap());
            assert!(commit.is_some_and(is_digest), "{}: {action} is not pinned to a commit", shown(&path));
            pinned += 1;
        }
    }
    assert!(pinned > 10);
}

#[test]
fn dependencies_point_one_way() {
    assert!(workspace_dependencies("dflop-costmodel").is_empty());
    let balancer = workspace_dependencies("dflop-balancer");
    assert!(balancer.iter().all(|name| name == "dflop-costmodel"), "{balancer:?}");
    assert_eq!(workspace_dependencies("dflop-samples"), ["dflop-costmodel"]);
    assert_eq!(workspace_dependencies("dflop-processors"), ["dflop-costmodel", "dflop-samples"]);
    let loader = workspace_dependencies("dflop-loader");
    assert_eq!(loader, ["dflop-balancer", "dflop-costmodel", "dflop-samples"], "without its optional part");
    assert_eq!(workspace_dependencies("dflop-planner"), ["dflop-balancer", "dflop-costmodel"]);
    let import = workspace_dependencies("dflop-import");
    assert_eq!(import, ["dflop-balancer", "dflop-costmodel", "dflop-loader", "dflop-samples"]);
    let executor = workspace_dependencies("dflop-executor");
    let nested = [
        "dflop-comm",
        "dflop-device",
        "dflop-models",
        "dflop-planner",
        "dflop-processors",
        "dflop-samples",
        "dflop-synthetic",
    ];
    let to_the_left = ["dflop-balancer", "dflop-costmodel", "dflop-loader"];
    let may_use = |name: &String| to_the_left.iter().chain(&nested).any(|other| other == name);
    assert!(executor.iter().all(may_use), "{executor:?}");
    assert_eq!(workspace_dependencies("dflop-device"), ["dflop-comm", "dflop-costmodel"]);
    assert_eq!(workspace_dependencies("dflop-comm"), ["dflop-costmodel"]);
    assert_eq!(workspace_dependencies("dflop-cuda"), ["dflop-comm", "dflop-costmodel", "dflop-device"]);
    assert_eq!(workspace_dependencies("dflop-models"), ["dflop-comm", "dflop-costmodel", "dflop-device"]);
    assert_eq!(workspace_dependencies("dflop-synthetic"), ["dflop-costmodel"]);
    let testing = workspace_dependencies("dflop-testing");
    assert!(testing.iter().all(|name| *name == "dflop-executor" || executor.contains(name)), "{testing:?}");
    let cli = workspace_dependencies("dflop-cli");
    let is_top_level = |name: &&String| *name != "dflop-import" && !nested.contains(&name.as_str());
    let of_top_level: Vec<&String> = cli.iter().filter(is_top_level).collect();
    assert_eq!(of_top_level, ["dflop-balancer", "dflop-costmodel", "dflop-executor", "dflop-loader"]);
    let python = workspace_dependencies("dflop-python");
    assert!(python.iter().all(|name| *name == "dflop-cli" || cli.contains(name)), "{python:?}");
}

#[test]
fn arrow2_is_not_a_dependency_unless_requested() {
    let mut command = Command::new(env!("CARGO"));
    command.args(["tree", "--offline", "--workspace", "--prefix", "none", "--format", "{p}"]);
    let output = command.current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8(output.stdout).unwrap();
    assert!(!tree.lines().any(|line| line.starts_with("arrow2 ")), "the default tree holds arrow2");
    // The tree with the feature would need the crate, which a machine without a network may not have.
    let manifest = std::fs::read_to_string(root().join("loader/Cargo.toml")).unwrap();
    assert!(manifest.contains("dep:arrow2"), "the feature brings it");
}

#[test]
fn the_command_has_no_cuda_unless_requested() {
    assert!(!workspace_dependencies("dflop-cli").contains(&"dflop-cuda".to_owned()));
    for (manifest, feature) in [("bindings/cli", "dflop-executor/cuda"), ("executor", "dep:dflop-cuda")] {
        let manifest = std::fs::read_to_string(root().join(manifest).join("Cargo.toml")).unwrap();
        assert!(manifest.contains(feature), "the feature brings it");
    }
}

/// Returns the settings in a manifest table.
fn table<'a>(manifest: &'a str, heading: &str) -> Vec<&'a str> {
    let lines = manifest.lines().skip_while(|line| *line != heading).skip(1);
    let settings: Vec<&str> = lines
        .take_while(|line| !line.starts_with('['))
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    assert!(!settings.is_empty(), "there is no table {heading}");
    settings
}

/// Returns names and versions of the registry packages in a lock file.
fn locked(lock: &str) -> Vec<(&str, &str)> {
    let packages = lock.split("[[package]]").filter(|package| package.contains("\nsource = "));
    packages
        .map(|package| {
            let value = |name: &str| package.lines().find_map(|line| line.strip_prefix(name));
            (value("name = ").expect("a name"), value("version = ").expect("a version"))
        })
        .collect()
}

/// The workspace for the CUDA stand-in uses the crates that this workspace has built.
#[test]
fn the_workspace_of_the_stand_in_builds_as_this_one() {
    let read = |name: &str| std::fs::read_to_string(root().join(name)).unwrap();
    let (own, nested) = (read("Cargo.toml"), read("tests/cuda-stand-in/Cargo.toml"));
    for heading in ["[workspace.lints.rust]", "[workspace.lints.clippy]", "[profile.dev]"] {
        // Repository crates are compiled for each workspace with the settings of the workspace.
        let shared = |manifest| -> Vec<&str> {
            let lines = table(manifest, heading).into_iter();
            lines.filter(|line| !line.starts_with("package.dflop-")).collect()
        };
        assert_eq!(shared(&nested), shared(&own), "{heading}");
    }
    let requirements = table(&own, "[workspace.dependencies]");
    for requirement in table(&nested, "[workspace.dependencies]") {
        assert!(requirement.contains("path = ") || requirements.contains(&requirement), "{requirement}");
    }
    let (own, nested) = (read("Cargo.lock"), read("tests/cuda-stand-in/Cargo.lock"));
    let versions = locked(&own);
    for package in locked(&nested) {
        assert!(versions.contains(&package), "tests/cuda-stand-in/Cargo.lock has another {package:?}");
    }
}

#[test]
fn a_streaming_loader_has_no_tokenizer_template_or_spectrogram() {
    let tree = |features: &[&str]| {
        let mut command = Command::new(env!("CARGO"));
        command.args(["tree", "--offline", "--edges", "normal", "--prefix", "none", "--format", "{p}"]);
        command.args(["-p", "dflop-loader", "--no-default-features"]).args(features);
        let output = command.current_dir(root()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let has = |tree: &str, name: &str| tree.lines().any(|line| line.starts_with(&format!("{name} ")));
    let (plain, full) = (tree(&[]), tree(&["--features", "processors"]));
    for name in ["tokenizers", "minijinja", "realfft", "rubato"] {
        assert!(!has(&plain, name), "a loader without processors depends on {name}");
        assert!(has(&full, name), "processors bring {name}");
    }
}

#[test]
fn files_have_at_most_600_lines() {
    let long = |path: &PathBuf| {
        let lines = std::fs::read_to_string(path).unwrap().lines().count();
        (lines > 600).then(|| format!("{}: {lines}", shown(path)))
    };
    let long: Vec<_> = rust_files().iter().chain(&kernel_files()).filter_map(long).collect();
    assert!(long.is_empty(), "over 600 lines: {long:?}");
}

/// Minimum lines of code in a file.
const CODE_LINES_MIN: usize = 60;

/// File names of roots, which may be short: of crates, rooms and programs, their errors and fuzz targets.
const ROOTS: [&str; 5] = ["lib.rs", "mod.rs", "main.rs", "error.rs", "fuzz.rs"];

/// Directories with a family of equals, one per file.
const FAMILIES: [(&str, &str); 15] = [
    ("balancer/planner/src/compare/", "baselines"),
    ("balancer/src/partition/strategy/", "strategies"),
    ("bindings/cli/src/commands/", "commands"),
    ("costmodel/src/model/families/", "model families"),
    ("costmodel/src/tokens/", "token rules"),
    ("executor/cuda/src/ops/", "operations"),
    ("executor/device/src/conformance/", "cases"),
    ("executor/device/src/ops/", "operations"),
    ("executor/models/src/families/", "model families"),
    ("executor/testing/src/", "suites"),
    ("loader/processors/src/family/", "model families"),
    ("loader/samples/src/media/", "codecs and decoders"),
    ("tests/cuda-stand-in/executor/src/", "kinds of devices"),
    ("tests/interleavings/src/", "models, and what they exchange"),
    ("tests/src/fuzz/", "fuzz targets"),
];

/// Files that `tests/interleavings` replaces.
const REPLACED: [&str; 3] =
    ["executor/comm/src/sync.rs", "executor/comm/src/tcp/socket.rs", "loader/src/flow/sync.rs"];

/// Short files of no such kind. None may be added.
const SHORT: [&str; 9] = [
    "balancer/planner/src/report.rs",
    "balancer/src/digest.rs",
    "bindings/python/src/arrays/imports.rs",
    "bindings/python/src/cli.rs",
    "bindings/python/src/table.rs",
    "executor/src/train/evaluation.rs",
    "loader/src/plan/config.rs",
    "loader/src/plan/stage_layers.rs",
    "loader/src/plan/token_balance.rs",
];

/// Returns the number of lines with code before the test module.
fn code_lines(text: &str) -> usize {
    let is_test_module = |at: usize| {
        let item = text[at..].lines().find(|line| !line.starts_with("#["));
        item.is_some_and(|line| line.starts_with("mod ") && line.ends_with('{'))
    };
    let mut starts = text.match_indices("#[cfg(test)]\n").map(|(at, _)| at);
    let end = starts.find(|at| is_test_module(*at)).unwrap_or(text.len());
    let lines = text[..end].lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with("//")).count()
}

/// Returns the files of modules that a file declares under a condition, and the files that it includes by
/// path.
fn optional_files(path: &Path, text: &str) -> Vec<PathBuf> {
    let directory = path.parent().expect("a file has a directory");
    let is_root = ["lib.rs", "mod.rs", "main.rs"].iter().any(|name| path.ends_with(name));
    let below = if is_root { directory.to_owned() } else { path.with_extension("") };
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(name) = line.split_once("mod ").and_then(|(_, name)| name.strip_suffix(';')) else {
            continue;
        };
        let attributes = lines[..at].iter().rev().take_while(|line| line.starts_with("#["));
        for attribute in attributes {
            let included = attribute.strip_prefix("#[path = \"").and_then(|rest| rest.strip_suffix("\"]"));
            if let Some(included) = included {
                found.extend(directory.join(included).canonicalize());
            } else if attribute.starts_with("#[cfg(") {
                found.extend(below.join(format!("{name}.rs")).canonicalize());
            }
        }
    }
    found
}

#[test]
fn short_files_are_roots_optional_or_of_a_family() {
    let root = root().canonicalize().unwrap();
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).unwrap();
        (path.canonicalize().unwrap(), text)
    };
    let files: Vec<(PathBuf, String)> = rust_files().into_iter().map(read).collect();
    let optional: Vec<PathBuf> = files.iter().flat_map(|(path, text)| optional_files(path, text)).collect();
    assert!(optional.len() > 20, "modules under conditions were found");
    let (mut found, mut families) = (Vec::new(), Vec::new());
    for (path, text) in &files {
        let name = path.strip_prefix(&root).unwrap().display().to_string();
        let is_product = name.contains("/src/") && !name.contains("/bin/");
        let is_tested =
            name.ends_with("/tests.rs") || name.contains("/tests/") && !name.starts_with("tests/");
        let is_root = ROOTS.iter().any(|root| path.ends_with(root));
        if !is_product || is_tested || is_root || code_lines(text) >= CODE_LINES_MIN {
            continue;
        }
        let family = FAMILIES.iter().find(|(directory, _)| name.starts_with(directory));
        families.extend(family);
        let is_listed = REPLACED.contains(&name.as_str()) || optional.contains(path);
        if family.is_none() && !is_listed {
            found.push(name);
        }
    }
    for name in &found {
        let advice = "join it with the file whose concept it belongs to";
        assert!(SHORT.contains(&name.as_str()), "{name}: below {CODE_LINES_MIN} lines of code; {advice}");
    }
    for name in SHORT {
        assert!(found.iter().any(|found| found == name), "{name} is listed, and not short: remove it");
    }
    for family in &FAMILIES {
        assert!(families.contains(&family), "{} has no short file: remove it", family.0);
    }
}

#[test]
fn lines_of_code_are_counted_without_comments_and_tests() {
    let text = "//! A file.\n\nuse a::b;\n\n/// A function.\nfn c() {\n    // Why.\n    b();\n}\n\n\
                #[cfg(test)]\nfn helper() {}\n\n#[cfg(test)]\n#[expect(x)]\nmod tests {\n    use d;\n}\n";
    assert_eq!(code_lines(text), 6);
}

#[test]
fn unsafe_code_stays_where_memory_is_mapped_handed_over_and_multiplied() {
    let allowed = [
        "loader/src/store/local.rs",
        // The fuzzer's allocator, a separate program.
        "tests/fuzz/src/main.rs",
        "loader/src/index/arrow2.rs",
        // Calls to the CUDA libraries, and device memory addresses.
        "executor/cuda/src/attention/cudnn_engine.rs",
        "executor/cuda/src/blas/descriptors.rs",
        "executor/cuda/src/blas/mod.rs",
        "executor/cuda/src/blas/plan.rs",
        "executor/cuda/src/compiler/nvrtc.rs",
        "executor/cuda/src/cudnn/descriptor.rs",
        "executor/cuda/src/cudnn/execute.rs",
        "executor/cuda/src/cudnn/library.rs",
        "executor/cuda/src/device/runtime.rs",
        "executor/cuda/src/driver/context.rs",
        "executor/cuda/src/driver/function.rs",
        "executor/cuda/src/driver/memory_pool.rs",
        "executor/cuda/src/driver/mod.rs",
        "executor/cuda/src/driver/staging.rs",
        "executor/cuda/src/driver/stream.rs",
        "executor/cuda/src/nccl/communicator.rs",
        "executor/cuda/src/libraries/function_tables.rs",
        "executor/cuda/src/libraries/mod.rs",
        "executor/cuda/src/nccl/library.rs",
        "executor/cuda/src/ops/elementwise.rs",
        "executor/cuda/src/ops/gemm.rs",
        "executor/cuda/src/ops/mod.rs",
        "tests/cuda-stand-in/executor/tests/cudnn/driver.rs",
        "tests/cuda-stand-in/src/control.rs",
        "tests/cuda-stand-in/src/nccl_control.rs",
        "tests/cuda-stand-in/tests/nccl/library.rs",
        "tests/cuda-stand-in/tests/support/product.rs",
        "tests/cuda-stand-in/tests/support/raw.rs",
        // MPI functions.
        "executor/mpi/src/raw.rs",
        "executor/device/src/cpu/memory.rs",
        "executor/device/src/ops/gemm.rs",
        "bindings/python/src/arrays/array.rs",
        "bindings/python/src/arrays/dlpack.rs",
        "bindings/python/src/arrays/storage.rs",
    ]
    .map(|path| root().join(path));
    for path in rust_files().iter().filter(|path| !allowed.contains(path)) {
        let text = std::fs::read_to_string(path).unwrap();
        let is_unsafe =
            |line: &str| line.contains(concat!("unsafe", " {")) || line.contains(concat!("unsafe", " fn"));
        assert!(!text.lines().any(is_unsafe), "{}", path.display());
    }
}

#[test]
fn the_pure_crates_do_no_io() {
    for path in rust_files() {
        let is_pure = ["balancer", "balancer/planner", "costmodel"]
            .iter()
            .any(|name| path.starts_with(root().join(name).join("src")));
        let text = std::fs::read_to_string(&path).unwrap();
        let body = text.split("#[cfg(test)]").next().unwrap_or_default();
        let code = body.lines().filter(|line| !line.trim_start().starts_with("//"));
        let has_io = |line: &str| {
            ["std::fs", "std::net", "std::thread", "std::time"].iter().any(|io| line.contains(io))
        };
        assert!(!is_pure || !code.into_iter().any(has_io), "{}", path.display());
    }
}

/// Whether a text has a word that is not the beginning of another.
fn has_word(text: &str, word: &str) -> bool {
    let is_end = |rest: &str| !rest.starts_with(char::is_alphabetic);
    text.match_indices(word).any(|(at, _)| is_end(&text[at + word.len()..]))
}

#[test]
fn the_balancer_never_sees_a_sample_and_the_loader_never_sees_a_device() {
    let says = |directory: &str, words: &[&str]| {
        let files =
            rust_files().into_iter().filter(|path| path.starts_with(root().join(directory).join("src")));
        let hits = files.filter(|path| {
            let text = std::fs::read_to_string(path).unwrap();
            words.iter().any(|word| has_word(&text, word))
        });
        hits.collect::<Vec<_>>()
    };
    assert_eq!(says("balancer", &["RawSample", "SampleShape", "Shard"]), Vec::<PathBuf>::new());
    assert_eq!(says("loader", &["cudarc", "nccl", "safetensors"]), Vec::<PathBuf>::new());
}
