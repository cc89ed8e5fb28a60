//! Counts statements, to compare the length of programs in two languages.
//!
//! Counted alike in both: each statement, also in nested blocks, each function, type, constant and field. Not counted:
//! imports, comments, docstrings, and the branches of an expression (`a if c else b`).

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use syn::visit::{self, Visit};

/// The parts of a recipe, each under a heading comment.
pub const PARTS: [&str; 3] = ["Model", "Data", "Training"];

/// The statements of each part.
pub type Counts = [usize; PARTS.len()];

/// Of a Rust file.
pub fn of_rust(path: &Path) -> Result<Counts> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let mut counts = Counts::default();
    for (part, count) in parts(&text, "// ")?.into_iter().zip(&mut counts) {
        let mut counter = Counter { count: 0, is_statement: false };
        counter.visit_file(&syn::parse_file(part).with_context(|| path.display().to_string())?);
        *count = counter.count;
    }
    Ok(counts)
}

/// Of a Python file, by Python's own parser.
pub fn of_python(python: &Path, path: &Path) -> Result<Counts> {
    const COUNT: &str = "
import ast, sys
tree = ast.parse(sys.stdin.read())
def counts(node):
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.stmt) and not docstring and not isinstance(node, (ast.Import, ast.ImportFrom))
print(sum(counts(node) for node in ast.walk(tree)))
";
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let mut counts = Counts::default();
    for (part, count) in parts(&text, "# ")?.into_iter().zip(&mut counts) {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), part)?;
        let output = Command::new(python).args(["-c", COUNT]).stdin(file.reopen()?).output().context("python")?;
        let found = String::from_utf8_lossy(&output.stdout).trim().parse();
        *count = found.with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    }
    Ok(counts)
}

/// The text below each heading; what is above the first one are imports.
fn parts<'a>(text: &'a str, comment: &str) -> Result<[&'a str; PARTS.len()]> {
    let mut rest = text;
    let mut below = Vec::new();
    for part in PARTS {
        let heading = format!("\n{comment}{part}\n");
        let (before, after) = rest.split_once(&heading).with_context(|| format!("no heading {part}"))?;
        below.push(before);
        rest = after;
    }
    below.push(rest);
    ensure!(below.len() == PARTS.len() + 1, "one part a heading");
    Ok([below[1], below[2], below[3]])
}

struct Counter {
    count: usize,
    /// Whether the expression that comes next is a statement, whose blocks hold statements; not so the branches of an
    /// expression that only chooses a value.
    is_statement: bool,
}

impl<'ast> Visit<'ast> for Counter {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !matches!(item, syn::Item::Use(_)) {
            self.count += 1;
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        self.count += 1;
        visit::visit_impl_item(self, item);
    }

    fn visit_field(&mut self, _: &'ast syn::Field) {
        self.count += 1;
    }

    fn visit_stmt(&mut self, statement: &'ast syn::Stmt) {
        // An item is counted as one.
        if !matches!(statement, syn::Stmt::Item(_)) {
            self.count += 1;
        }
        self.is_statement = matches!(statement, syn::Stmt::Expr(..));
        visit::visit_stmt(self, statement);
    }

    fn visit_expr(&mut self, expression: &'ast syn::Expr) {
        let is_statement = std::mem::take(&mut self.is_statement);
        visit::visit_expr(self, expression);
        let chooses = matches!(expression, syn::Expr::If(_) | syn::Expr::Block(_) | syn::Expr::Match(_));
        if chooses && !is_statement && only_values(expression) {
            self.count -= branches(expression);
        }
    }

    fn visit_expr_if(&mut self, choice: &'ast syn::ExprIf) {
        self.visit_expr(&choice.cond);
        self.visit_block(&choice.then_branch);
        if let Some((_, other)) = &choice.else_branch {
            self.is_statement = true;
            self.visit_expr(other);
        }
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if let Some((_, guard)) = &arm.guard {
            self.visit_expr(guard);
        }
        if !matches!(*arm.body, syn::Expr::Block(_)) {
            self.count += 1;
        }
        self.is_statement = true;
        self.visit_expr(&arm.body);
    }
}

/// How many branches it has.
fn branches(expression: &syn::Expr) -> usize {
    match expression {
        syn::Expr::If(choice) => 1 + choice.else_branch.as_ref().map_or(0, |(_, other)| branches(other)),
        syn::Expr::Match(choice) => choice.arms.len(),
        _ => 1,
    }
}

/// Whether every branch is an expression alone.
fn only_values(expression: &syn::Expr) -> bool {
    let is_loop = |it: &syn::Expr| matches!(it, syn::Expr::ForLoop(_) | syn::Expr::While(_) | syn::Expr::Loop(_));
    let is_value =
        |block: &syn::Block| matches!(block.stmts.as_slice(), [syn::Stmt::Expr(value, None)] if !is_loop(value));
    match expression {
        syn::Expr::If(branches) => {
            let other = branches.else_branch.as_ref().is_none_or(|(_, other)| only_values(other));
            is_value(&branches.then_branch) && other
        }
        syn::Expr::Block(block) => is_value(&block.block),
        syn::Expr::Match(choice) => choice.arms.iter().all(|arm| match &*arm.body {
            syn::Expr::Block(block) => is_value(&block.block),
            _ => true,
        }),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(code: &str) -> usize {
        let mut counter = Counter { count: 0, is_statement: false };
        counter.visit_file(&syn::parse_file(code).unwrap());
        counter.count
    }

    #[test]
    fn statements_are_counted_in_every_block() {
        assert_eq!(count("use a::b; const A: u8 = 1;"), 1);
        assert_eq!(count("struct A { a: u8, b: u8 } impl A { fn f() {} }"), 5);
        assert_eq!(count("fn f() { let a = 1; for i in 0..3 { g(i); if i > 1 { h(); } else { k() } } }"), 7);
    }

    #[test]
    fn an_expression_that_chooses_a_value_is_one_statement() {
        assert_eq!(count("fn f() { let a = if b { 1 } else { 2 }; }"), 2);
        assert_eq!(count("fn f() { let a = if b { g(); 1 } else { 2 }; }"), 5);
        assert_eq!(count("fn f() { g(|| { for i in 0..3 { a(); b(); } }); }"), 5);
        assert_eq!(count("fn f() { let a = if b { c(|| { d(); e() }) } else { 2 }; }"), 4);
        assert_eq!(count("fn f() { let a = match b { 1 => 2, _ => 3 }; }"), 2);
        assert_eq!(count("fn f() { match b { 1 => g(), _ => { h(); k(); } } }"), 5);
    }

    #[test]
    fn parts_are_below_their_headings() {
        let text = "//! Doc\nuse a;\n\n// Model\n\nm\n\n// Data\n\nd\n\n// Training\n\nt\n";
        assert_eq!(parts(text, "// ").unwrap(), ["\nm\n", "\nd\n", "\nt\n"]);
        assert!(parts("// Model\n", "// ").is_err());
    }
}
