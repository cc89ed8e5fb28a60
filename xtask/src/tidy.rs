//! Checks the invariants of ARCHITECTURE.md that a program can check. Each rule is a function from a tree to its
//! problems.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::metadata::{self, Dependency, Package};
use crate::source::{self, Language};
use crate::workspace::{self, Workspace};

const LICENSE: &str = "MIT OR Apache-2.0";
const LONGEST_FILE: usize = 400;
/// Crates that must build without libtorch when default features are off.
const WITHOUT_LIBTORCH: [&str; 3] = ["jpeg", "launch", "sched"];
/// The crates that feature crates may depend on; docs/adr/0013 and 0015 say what may be added.
const FOUNDATION: [&str; 4] = ["crates/core", "crates/ffi", "crates/jpeg", "crates/launch"];

/// A feature crate that builds on another one, and the feature crates that its tests use besides (docs/adr/0019).
const BUILDS_ON: [(&str, &str); 1] = [("crates/shard", "crates/ddp")];
const TESTED_WITH: [(&str, [&str; 6]); 1] = [(
    "crates/shard",
    ["crates/accum", "crates/amp", "crates/checkpoint", "crates/memory", "crates/optim", "crates/sched"],
)];
/// A feature crate that makes objects of others behind a feature, so that they are optional dependencies (docs/adr/0020).
const MAKES: [(&str, [&str; 4]); 1] =
    [("crates/shard", ["crates/amp", "crates/memory", "crates/optim", "crates/sched"])];

/// Folder for what only tests need, such as a stand-in for CUDA's runtime. It may contain C++ and `unsafe`, because no
/// user's program contains it.
const TEST_SUPPORT: &str = "testing/";

/// The input of the rules, small enough to write by hand in a test.
#[derive(Default)]
struct Tree {
    /// Text by path from the root, with `/` between folders.
    files: BTreeMap<String, String>,
    members: Vec<Member>,
    /// The dependencies of the crates that have to build without libtorch, with default features off, by folder.
    without_libtorch: BTreeMap<String, String>,
}

/// A package of the workspace.
#[derive(Default)]
struct Member {
    name: String,
    folder: String,
    license: Option<String>,
    /// The folders of the workspace's packages that it depends on, also for builds and tests; without test support that
    /// only its tests need.
    depends_on: Vec<String>,
    /// The root source files of its libraries and programs.
    roots: Vec<String>,
}

impl Member {
    /// `amp` for `crates/amp`; `None` for packages outside `crates/`.
    fn crate_folder(&self) -> Option<&str> {
        self.folder.strip_prefix("crates/")
    }

    /// `crates/nn` for its macros in `crates/nn/macros`, which Rust requires to be a package.
    fn owner(&self) -> Option<&str> {
        self.folder.strip_suffix("/macros").filter(|owner| owner.starts_with("crates/"))
    }

    /// Whether it has programs and no library.
    fn is_program(&self) -> bool {
        !self.roots.is_empty() && self.roots.iter().all(|root| root.ends_with("main.rs"))
    }
}

type Rule = fn(&Tree) -> Vec<String>;

const RULES: [Rule; 11] = [
    unsafe_and_cpp_stay_in_ffi,
    every_other_crate_forbids_unsafe,
    feature_crates_stand_alone,
    some_need_no_libtorch,
    cpp_entry_points_are_noexcept,
    folders_name_packages,
    packages_are_licensed_and_linted,
    crates_call_no_scalar_forms_of_tch,
    files_are_short,
    documents_name_every_crate,
    |tree| crate::readme::problems(&tree.files),
];

pub fn run(ws: &Workspace) -> Result<ExitCode> {
    let tree = load(ws)?;
    let problems: Vec<String> = RULES.iter().flat_map(|rule| rule(&tree)).collect();
    for problem in &problems {
        eprintln!("{problem}");
    }
    if !problems.is_empty() {
        bail!("tidy found {} problems; ARCHITECTURE.md has the reason for each rule", problems.len());
    }
    println!("tidy: {} rules hold over {} files", RULES.len(), tree.files.len());
    Ok(ExitCode::SUCCESS)
}

fn load(ws: &Workspace) -> Result<Tree> {
    let mut tree = Tree::default();
    read_files(ws.root(), "", &mut tree.files)?;
    tree.members = metadata::packages(ws)?.iter().map(|package| member(ws.root(), package)).collect();
    for folder in WITHOUT_LIBTORCH {
        if tree.members.iter().any(|member| member.crate_folder() == Some(folder)) {
            let package = format!("overdrive-{folder}");
            let args = ["tree", "--package", &package, "--no-default-features", "--edges", "normal,build"];
            let text = workspace::capture(ws.cargo(args).args(["--prefix", "none"]))?;
            tree.without_libtorch.insert(folder.to_owned(), text);
        }
    }
    Ok(tree)
}

/// Reads the text files below a folder, without `target` and hidden folders.
fn read_files(root: &Path, folder: &str, files: &mut BTreeMap<String, String>) -> Result<()> {
    let path = root.join(folder);
    let entries = fs::read_dir(&path).with_context(|| format!("cannot read {}", path.display()))?;
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot read {}", path.display()))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let relative = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        let kind = entry.file_type().with_context(|| format!("cannot look at {relative}"))?;
        if kind.is_dir() && !name.starts_with('.') && name != "target" {
            read_files(root, &relative, files)?;
        } else if kind.is_file() {
            // Images and archives are not text, and no rule is about them.
            let bytes = fs::read(entry.path()).with_context(|| format!("cannot read {relative}"))?;
            if let Ok(text) = String::from_utf8(bytes) {
                files.insert(relative, text);
            }
        }
    }
    Ok(())
}

fn member(root: &Path, package: &Package) -> Member {
    let relative = |path: &Path| path.strip_prefix(root).unwrap_or(path).to_string_lossy().into_owned();
    let is_root = |kind: &str| ["lib", "bin", "proc-macro"].contains(&kind);
    let roots = package.targets.iter().filter(|target| target.kind.iter().any(|kind| is_root(kind)));
    let own = package.manifest_path.parent().map(relative).unwrap_or_default();
    let is_tested_with =
        |folder: &str| TESTED_WITH.iter().any(|(tested, with)| *tested == own && with.contains(&folder));
    let is_made = |folder: &str| MAKES.iter().any(|(maker, made)| *maker == own && made.contains(&folder));
    let folder = |it: &Dependency| {
        let folder = relative(it.path.as_deref()?);
        let may_test = folder.starts_with(TEST_SUPPORT) || is_tested_with(&folder);
        let is_for_tests = it.kind.as_deref() == Some("dev") && may_test;
        let is_for_a_feature = it.optional && is_made(&folder);
        (!is_for_tests && !is_for_a_feature).then_some(folder)
    };
    Member {
        name: package.name.clone(),
        folder: own.clone(),
        license: package.license.clone(),
        depends_on: package.dependencies.iter().filter_map(folder).collect(),
        roots: roots.map(|target| relative(&target.src_path)).collect(),
    }
}

fn extension(path: &str) -> &str {
    Path::new(path).extension().and_then(|it| it.to_str()).unwrap_or_default()
}

fn is_cpp(path: &str) -> bool {
    ["c", "cc", "cpp", "cxx", "cu", "cuh", "h", "hpp", "inl"].contains(&extension(path))
}

/// Invariant 1, first half.
fn unsafe_and_cpp_stay_in_ffi(tree: &Tree) -> Vec<String> {
    let mut problems = Vec::new();
    let may = |path: &str| path.starts_with("crates/ffi/") || path.starts_with(TEST_SUPPORT);
    for (path, text) in tree.files.iter().filter(|(path, _)| !may(path)) {
        if is_cpp(path) {
            problems.push(format!("{path}: C++ outside crates/ffi"));
        }
        if extension(path) == "rs" {
            let code = source::code_only(text, Language::Rust);
            let lines = source::lines_with_word(&code, "unsafe");
            problems.extend(lines.iter().map(|line| format!("{path}:{line}: `unsafe` outside crates/ffi")));
        }
    }
    problems
}

/// Invariant 1, second half.
fn every_other_crate_forbids_unsafe(tree: &Tree) -> Vec<String> {
    let may = |member: &&Member| member.folder == "crates/ffi" || member.folder.starts_with(TEST_SUPPORT);
    let members = tree.members.iter().filter(|member| !may(member));
    let roots = members.flat_map(|member| &member.roots);
    let forbids = |root: &&String| tree.files.get(*root).is_some_and(|text| text.contains("#![forbid(unsafe_code)]"));
    roots.filter(|root| !forbids(root)).map(|root| format!("{root}: does not say `#![forbid(unsafe_code)]`")).collect()
}

/// Invariant 2. Only the facade, and programs, on which no crate depends, may combine feature crates; all other crates
/// under `crates/` depend only on the foundation.
fn feature_crates_stand_alone(tree: &Tree) -> Vec<String> {
    let mut problems = Vec::new();
    let is_feature =
        |member: &&Member| member.crate_folder().is_some_and(|it| it != "overdrive") && !member.is_program();
    for member in tree.members.iter().filter(is_feature) {
        for other in &member.depends_on {
            // Itself, with the features that its tests need.
            let is_own = *other == member.folder
                || tree.members.iter().any(|it| it.folder == *other && it.owner() == Some(&member.folder));
            let builds_on = BUILDS_ON.contains(&(member.folder.as_str(), other.as_str()));
            if member.owner().is_some() || !(is_own || builds_on || FOUNDATION.contains(&other.as_str())) {
                problems.push(format!(
                    "{}/Cargo.toml: depends on {other}; connect them by a trait in crates/core, and use them together \
                     in the facade's tests or in examples/",
                    member.folder
                ));
            }
        }
    }
    // The facade and programs too must not depend on test support.
    for member in tree.members.iter().filter(|member| member.crate_folder().is_some()) {
        for other in member.depends_on.iter().filter(|other| other.starts_with(TEST_SUPPORT)) {
            problems.push(format!(
                "{}/Cargo.toml: depends on {other}, which is for tests only: make it a dev-dependency (docs/adr/0013)",
                member.folder
            ));
        }
    }
    problems
}

/// Invariant 3.
fn some_need_no_libtorch(tree: &Tree) -> Vec<String> {
    let names_tch = |line: &&str| line.starts_with("tch ") || line.starts_with("torch-sys ");
    let problem = |(folder, text): (&String, &String)| {
        let found = text.lines().find(names_tch)?;
        Some(format!("crates/{folder}/Cargo.toml: needs {found} with default features off; make it optional"))
    };
    tree.without_libtorch.iter().filter_map(problem).collect()
}

/// Invariant 5, as far as declarations show it.
fn cpp_entry_points_are_noexcept(tree: &Tree) -> Vec<String> {
    let mut problems = Vec::new();
    for (path, text) in tree.files.iter().filter(|(path, _)| is_cpp(path)) {
        for (line, declaration) in source::extern_c_functions(text) {
            if !declaration.contains("noexcept") {
                problems.push(format!("{path}:{line}: `{declaration}` is not `noexcept`"));
            }
        }
    }
    problems
}

fn folders_name_packages(tree: &Tree) -> Vec<String> {
    let mut problems = Vec::new();
    for member in &tree.members {
        let Some(folder) = member.crate_folder() else { continue };
        let dashed = folder.replace('/', "-");
        let expected = if folder == "overdrive" { dashed } else { format!("overdrive-{dashed}") };
        if member.name != expected {
            problems.push(format!("{}/Cargo.toml: the package is {}, not {expected}", member.folder, member.name));
        }
    }
    problems
}

fn packages_are_licensed_and_linted(tree: &Tree) -> Vec<String> {
    let missing = ["LICENSE-MIT", "LICENSE-APACHE"].into_iter().filter(|name| !tree.files.contains_key(*name));
    let mut problems: Vec<String> = missing.map(|name| format!("{name}: missing")).collect();
    for member in &tree.members {
        let manifest = format!("{}/Cargo.toml", member.folder);
        if member.license.as_deref() != Some(LICENSE) {
            problems.push(format!("{manifest}: say `license.workspace = true` ({LICENSE})"));
        }
        if !tree.files.get(&manifest).is_some_and(|text| text.contains("[lints]\nworkspace = true")) {
            problems.push(format!("{manifest}: say `workspace = true` under `[lints]`"));
        }
    }
    problems
}

/// tch's fallible calls that take a scalar panic when libtorch refuses: dropping the scalar reads the pending error
/// first.
fn crates_call_no_scalar_forms_of_tch(tree: &Tree) -> Vec<String> {
    const FORMS: [&str; 6] = ["_scalar(", "_scalar_(", ".f_full(", ".f_fill_(", ".f_clamp", ".f_arange("];
    let in_crates = |path: &str| path.starts_with("crates/") && path.contains("/src/") && extension(path) == "rs";
    let mut problems = Vec::new();
    for (path, text) in tree.files.iter().filter(|(path, _)| in_crates(path)) {
        // In tests a panic is fine.
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (number, line) in code.lines().enumerate() {
            if line.contains(".f_") && FORMS.iter().any(|form| line.contains(form)) {
                let place = format!("{path}:{}", number + 1);
                problems.push(format!("{place}: panics when libtorch fails; call it through overdrive_ffi::LazyOp"));
            }
        }
    }
    problems
}

fn files_are_short(tree: &Tree) -> Vec<String> {
    let is_code = |path: &str| is_cpp(path) || ["rs", "py", "sh"].contains(&extension(path));
    let generated = |text: &str| text.lines().take(3).any(|line| line.contains("@generated"));
    let long = tree.files.iter().filter(|(path, text)| is_code(path) && !generated(text)).filter_map(|(path, text)| {
        let lines = text.lines().count();
        (lines > LONGEST_FILE)
            .then(|| format!("{path}: {lines} lines, but should have {LONGEST_FILE} at most: split it"))
    });
    long.collect()
}

fn documents_name_every_crate(tree: &Tree) -> Vec<String> {
    let missing = tree.files.contains_key("CHANGELOG.md").then_some(Vec::new());
    let mut problems = missing.unwrap_or_else(|| vec!["CHANGELOG.md: missing".to_owned()]);
    for document in ["README.md", "ARCHITECTURE.md"] {
        let text = tree.files.get(document).map_or("", String::as_str);
        for member in tree.members.iter().filter(|member| member.crate_folder().is_some()) {
            if !text.contains(&member.folder) && !text.contains(&format!("`{}`", member.name)) {
                problems.push(format!("{document}: names neither `{}` nor {}", member.name, member.folder));
            }
        }
    }
    problems
}

#[cfg(test)]
#[path = "tidy_tests.rs"]
mod tests;
