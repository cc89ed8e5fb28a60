//! Each rule of `tidy` on a small tree that breaks it and on one that does not.

use super::*;

fn files(files: &[(&str, &str)]) -> Tree {
    let files = files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
    Tree { files, ..Tree::default() }
}

fn package(folder: &str, name: &str, depends_on: &[&str]) -> Member {
    Member {
        name: name.to_owned(),
        folder: folder.to_owned(),
        license: Some(LICENSE.to_owned()),
        depends_on: depends_on.iter().map(|it| (*it).to_owned()).collect(),
        roots: vec![format!("{folder}/src/lib.rs")],
    }
}

fn members<const N: usize>(members: [Member; N]) -> Tree {
    Tree { members: members.into(), ..Tree::default() }
}

#[test]
fn unsafe_outside_ffi_is_named_with_its_line() {
    let tree = files(&[
        ("crates/ffi/src/lib.rs", "unsafe { f() }"),
        ("crates/ffi/cpp/a.cpp", ""),
        ("crates/amp/src/lib.rs", "#![forbid(unsafe_code)]\n// unsafe\nfn f() { unsafe { g() } }"),
        ("crates/amp/tests/a.rs", "const TEXT: &str = \"unsafe\";"),
    ]);
    assert_eq!(unsafe_and_cpp_stay_in_ffi(&tree), ["crates/amp/src/lib.rs:3: `unsafe` outside crates/ffi"]);
}

#[test]
fn cpp_outside_ffi_is_named() {
    let tree = files(&[("crates/amp/src/a.hpp", ""), ("crates/ffi/cpp/b.hpp", "")]);
    assert_eq!(unsafe_and_cpp_stay_in_ffi(&tree), ["crates/amp/src/a.hpp: C++ outside crates/ffi"]);
}

#[test]
fn a_crate_that_does_not_forbid_unsafe_is_named() {
    let mut tree = files(&[
        ("crates/amp/src/lib.rs", "#![forbid(unsafe_code)]\n"),
        ("crates/optim/src/lib.rs", "#![deny(unsafe_code)]\n"),
        ("crates/ffi/src/lib.rs", ""),
    ]);
    tree.members = ["amp", "optim", "ffi"].map(|it| package(&format!("crates/{it}"), it, &[])).into();
    let problems = every_other_crate_forbids_unsafe(&tree);
    assert_eq!(problems, ["crates/optim/src/lib.rs: does not say `#![forbid(unsafe_code)]`"]);
}

#[test]
fn a_feature_crate_that_sees_another_is_named() {
    let good = package("crates/ddp", "overdrive-ddp", &["crates/core", "crates/ffi", "crates/jpeg", "crates/launch"]);
    let facade = package("crates/overdrive", "overdrive", &["crates/amp", "crates/optim"]);
    let outside = package("benches", "overdrive-benches", &["crates/amp"]);
    let bad = package("crates/optim", "overdrive-optim", &["crates/core", "crates/amp"]);
    let mut program = package("crates/data", "overdrive-data", &["crates/dataload"]);
    program.roots = vec!["crates/data/src/main.rs".to_owned()];
    let problems = feature_crates_stand_alone(&members([good, facade, outside, program, bad]));
    assert_eq!(problems.len(), 1);
    assert!(problems[0].starts_with("crates/optim/Cargo.toml: depends on crates/amp"));
}

#[test]
fn shard_builds_on_ddp_and_only_its_tests_and_a_feature_use_others() {
    let depending =
        |on: &[&str]| feature_crates_stand_alone(&members([package("crates/shard", "overdrive-shard", on)]));
    assert_eq!(depending(&["crates/core", "crates/ddp"]), [""; 0]);
    assert_eq!(depending(&["crates/optim"]).len(), 1);
    let depends_on = |folder: &str, kind: Option<&str>, optional: bool| {
        let (path, kind) = (Some("/w/crates/optim".into()), kind.map(str::to_owned));
        let dependencies = vec![Dependency { path, kind, optional }];
        let manifest_path = Path::new("/w").join(folder).join("Cargo.toml");
        member(Path::new("/w"), &Package { dependencies, manifest_path, ..Package::default() }).depends_on
    };
    assert_eq!(depends_on("crates/shard", Some("dev"), false), [""; 0]);
    assert_eq!(depends_on("crates/shard", None, false), ["crates/optim"]);
    assert_eq!(depends_on("crates/shard", None, true), [""; 0]);
    assert_eq!(depends_on("crates/amp", Some("dev"), false), ["crates/optim"]);
    assert_eq!(depends_on("crates/amp", None, true), ["crates/optim"]);
}

#[test]
fn only_their_owner_may_depend_on_macros() {
    let macros = || package("crates/nn/macros", "overdrive-nn-macros", &[]);
    let owner = package("crates/nn", "overdrive-nn", &["crates/core", "crates/nn/macros"]);
    assert_eq!(feature_crates_stand_alone(&members([macros(), owner])), [""; 0]);
    assert_eq!(folders_name_packages(&members([macros()])), [""; 0]);
    let other_crate = package("crates/amp", "overdrive-amp", &["crates/nn/macros"]);
    assert_eq!(feature_crates_stand_alone(&members([macros(), other_crate])).len(), 1);
    let with_dependency = package("crates/nn/macros", "overdrive-nn-macros", &["crates/core"]);
    assert_eq!(feature_crates_stand_alone(&members([with_dependency])).len(), 1);
}

#[test]
fn test_support_is_in_no_program() {
    let mut tree = files(&[("testing/cuda/a.cpp", ""), ("testing/cuda/src/lib.rs", "unsafe { f() }")]);
    tree.members = vec![package("testing/cuda", "overdrive-testing-cuda", &[])];
    assert_eq!(unsafe_and_cpp_stay_in_ffi(&tree), [""; 0]);
    assert_eq!(every_other_crate_forbids_unsafe(&tree), [""; 0]);
    for user in ["crates/amp", "crates/overdrive"] {
        let problems = feature_crates_stand_alone(&members([package(user, "overdrive", &["testing/cuda"])]));
        assert!(problems.iter().any(|it| it.contains("which is for tests")), "{problems:?}");
    }
    let depends_on = |kind: Option<&str>| {
        let path = Some("/w/testing/cuda".into());
        let dependencies = vec![Dependency { path, kind: kind.map(str::to_owned), optional: false }];
        member(Path::new("/w"), &Package { dependencies, ..Package::default() }).depends_on
    };
    assert_eq!((depends_on(Some("dev")), depends_on(None)), (vec![], vec!["testing/cuda".to_owned()]));
}

#[test]
fn crates_that_build_without_libtorch_must_not_depend_on_it() {
    let with = |text: &str| Tree { without_libtorch: [("sched".into(), text.into())].into(), ..Tree::default() };
    assert_eq!(some_need_no_libtorch(&Tree::default()), [""; 0]);
    assert_eq!(some_need_no_libtorch(&with("overdrive-sched v0.1.0\nserde v1.0.0\n")), [""; 0]);
    assert_eq!(some_need_no_libtorch(&with("overdrive-sched v0.1.0\ntch v0.24.0\ntorch-sys v0.24.0")).len(), 1);
}

#[test]
fn an_entry_point_that_may_throw_is_named() {
    let tree = files(&[("crates/ffi/cpp/a.h", "extern \"C\" {\nint good(void) noexcept;\nint bad(int a);\n}")]);
    assert_eq!(cpp_entry_points_are_noexcept(&tree), ["crates/ffi/cpp/a.h:3: `int bad(int a)` is not `noexcept`"]);
}

#[test]
fn a_package_is_named_after_its_folder() {
    let facade = package("crates/overdrive", "overdrive", &[]);
    let good = package("crates/amp", "overdrive-amp", &[]);
    let bad = package("crates/optim", "overdrive-optimizers", &[]);
    let problems = folders_name_packages(&members([facade, good, bad, package("benches", "anything", &[])]));
    assert_eq!(problems, ["crates/optim/Cargo.toml: the package is overdrive-optimizers, not overdrive-optim"]);
}

#[test]
fn missing_licences_and_lints_are_named() {
    let mut tree = files(&[
        ("LICENSE-MIT", ""),
        ("crates/amp/Cargo.toml", "[package]\n\n[lints]\nworkspace = true\n"),
        ("crates/optim/Cargo.toml", "[package]\n"),
    ]);
    let unlicensed = Member { license: None, ..package("crates/optim", "overdrive-optim", &[]) };
    tree.members = vec![package("crates/amp", "overdrive-amp", &[]), unlicensed];
    let problems = packages_are_licensed_and_linted(&tree);
    assert_eq!(problems.len(), 3);
    assert_eq!(problems[0], "LICENSE-APACHE: missing");
}

#[test]
fn a_long_file_is_named_unless_generated() {
    let long = "// a line\n".repeat(LONGEST_FILE + 1);
    let generated = format!("// @generated\n{long}");
    let tree = files(&[("a.rs", &long), ("b.rs", &generated), ("c.md", &long), ("d.rs", &long[10..])]);
    assert_eq!(files_are_short(&tree), ["a.rs: 401 lines, but should have 400 at most: split it"]);
}

#[test]
fn a_crate_that_a_document_leaves_out_is_named() {
    let mut tree = files(&[
        ("README.md", "| `overdrive-amp` | autocast |"),
        ("ARCHITECTURE.md", "crates/amp, crates/optim"),
        ("CHANGELOG.md", ""),
    ]);
    tree.members = vec![package("crates/amp", "overdrive-amp", &[]), package("crates/optim", "overdrive-optim", &[])];
    assert_eq!(documents_name_every_crate(&tree), ["README.md: names neither `overdrive-optim` nor crates/optim"]);
    tree.files.remove("CHANGELOG.md");
    assert_eq!(documents_name_every_crate(&tree)[0], "CHANGELOG.md: missing");
}

#[test]
fn a_scalar_form_of_tch_in_a_crate_is_named() {
    let bad = "fn a(x: &Tensor) {\n    x.f_mul_scalar(2.0)?;\n}\n#[cfg(test)]\nmod tests { x.f_add_scalar(1.0) }\n";
    let good = "x.f_mul(&y)?; MUL.tensor(&[Arg::Tensor(x), Arg::Double(2.0)])?;";
    let tree = files(&[("crates/amp/src/a.rs", bad), ("crates/amp/src/b.rs", good), ("benches/src/c.rs", bad)]);
    let problems = crates_call_no_scalar_forms_of_tch(&tree);
    assert_eq!(problems.len(), 1);
    assert!(problems[0].starts_with("crates/amp/src/a.rs:2:"), "{problems:?}");
}
