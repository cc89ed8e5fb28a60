//! Entries that stand before the C functions of the runtime, so that calls can be watched or made to fail.
//!
//! The entries are added for the linker, not written into each function, so that no function can lack one. The
//! functions of the static library are renamed, and each real name becomes a few instructions that test one number. If
//! it is 0, they jump to the function. Otherwise they call `fakecuda_enter` first. It returns 0, or the error that the
//! call is to return; the smallest number stands for success without the call.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// What the functions are called behind their entries.
const BEHIND: &str = "fc_behind_";

/// Saves the six registers and the eight vector registers that arguments are passed in (System V ABI, AMD64), because
/// `fakecuda_enter` may change them. `rax` is the name of the function and `r11` its address.
const WATCHED: &str = "
fc_watched:
    pushq %rdi; pushq %rsi; pushq %rdx; pushq %rcx; pushq %r8; pushq %r9; pushq %r11; pushq %rax
    subq $136, %rsp
    movups %xmm0, (%rsp); movups %xmm1, 16(%rsp); movups %xmm2, 32(%rsp); movups %xmm3, 48(%rsp)
    movups %xmm4, 64(%rsp); movups %xmm5, 80(%rsp); movups %xmm6, 96(%rsp); movups %xmm7, 112(%rsp)
    movq %rdi, %rsi
    movq %rax, %rdi
    call fakecuda_enter@PLT
    movups (%rsp), %xmm0; movups 16(%rsp), %xmm1; movups 32(%rsp), %xmm2; movups 48(%rsp), %xmm3
    movups 64(%rsp), %xmm4; movups 80(%rsp), %xmm5; movups 96(%rsp), %xmm6; movups 112(%rsp), %xmm7
    addq $136, %rsp
    addq $8, %rsp
    popq %r11; popq %r9; popq %r8; popq %rcx; popq %rdx; popq %rsi; popq %rdi
    testl %eax, %eax
    jne 1f
    jmp *%r11
1:  cmpl $0x80000000, %eax
    jne 2f
    xorl %eax, %eax
2:  ret
";

/// Whether a function returns a status, so that its entry can return one instead. The functions that register kernels
/// do not, and the entries themselves report calls to CUPTI.
fn returns_status(name: &str) -> bool {
    let words = ["ErrorString", "ErrorName", "StatusString", "StatusName", "LastError", "__cuda", "fakecuda_", "cupti"];
    let other = words.iter().any(|word| name.contains(word))
        || (name.ends_with("Version") && (name.contains("Lt") || name.starts_with("cudnn")));
    matches!(name, "__cudaLaunchKernel" | "cudaGetLastError" | "cudaPeekAtLastError") || !other
}

/// Adds entries for the functions of a static library. Returns the changed library and the object with the entries; no
/// object for a processor that they are not written for.
pub fn put_before(runtime: &Path, names: &BTreeSet<String>, out: &Path) -> (PathBuf, Option<PathBuf>) {
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64") {
        return (runtime.to_owned(), None);
    }
    let names: Vec<&String> = names.iter().filter(|name| returns_status(name)).collect();
    let mut renamed = String::new();
    let mut text = format!(".text\n.hidden fakecuda_watched\n{WATCHED}");
    for name in &names {
        renamed += &format!("{name} {BEHIND}{name}\n");
        text += &format!(
            ".globl {name}\n.type {name}, @function\n.hidden {BEHIND}{name}\n{name}:\n\
             cmpl $0, fakecuda_watched(%rip)\njne 1f\njmp {BEHIND}{name}\n\
             1: leaq {BEHIND}{name}(%rip), %r11\nleaq 2f(%rip), %rax\njmp fc_watched\n\
             .section .rodata\n2: .asciz \"{name}\"\n.text\n"
        );
    }
    text += ".section .note.GNU-stack,\"\",@progbits\n";
    let [list, source, object, library] =
        ["renamed.txt", "entries.s", "entries.o", "behind.a"].map(|name| out.join(name));
    for (path, text) in [(&list, &renamed), (&source, &text)] {
        fs::write(path, text).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
    }
    super::run(Command::new("objcopy").arg(format!("--redefine-syms={}", list.display())).arg(runtime).arg(&library));
    let mut compiler = cc::Build::new().cargo_metadata(false).get_compiler().to_command();
    super::run(compiler.arg("-c").arg(&source).arg("-o").arg(&object));
    (library, Some(object))
}
