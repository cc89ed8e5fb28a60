//! Models as text.

use overdrive_core::{Module, ModuleState, Visitor};
use tch::Tensor;

/// The module and all modules in it, as Python prints them.
///
/// # Source
/// `print(model)`
pub fn repr(module: &dyn Module) -> String {
    let mut modules = Modules(Vec::new());
    module.visit(&mut modules);
    let (text, Modules(modules)) = (module.describe(), modules);
    if modules.is_empty() {
        return if text.ends_with(')') { text } else { text + "()" };
    }
    let name = text.split('(').next().unwrap_or_default();
    format!("{name}(\n{})", lines(&modules, name == "ModuleList"))
}

/// One paragraph for each module; in a `ModuleList` one for equal modules that follow each other.
fn lines(modules: &[(String, &dyn Module)], in_list: bool) -> String {
    let mut blocks: Vec<(Vec<&str>, String)> = Vec::new();
    for (name, module) in modules {
        let text = repr(*module);
        match blocks.last_mut() {
            Some((names, same)) if in_list && *same == text => names.push(name),
            _ => blocks.push((vec![name], text)),
        }
    }
    let line = |(names, text): &(Vec<&str>, String)| {
        let text = text.replace('\n', "\n  ");
        match names[..] {
            [first, .., last] => format!("  ({first}-{last}): {} x {text}\n", names.len()),
            _ => format!("  ({}): {text}\n", names.concat()),
        }
    };
    blocks.iter().map(line).collect()
}

/// The modules of a module.
struct Modules<'a>(Vec<(String, &'a dyn Module)>);

impl<'a> Visitor<'a> for Modules<'a> {
    fn parameter(&mut self, _: &str, _: &Tensor) {}

    fn buffer(&mut self, _: &str, _: &Tensor, _: bool) {}

    fn module(&mut self, name: &str, module: &'a dyn Module) {
        self.0.push((name.to_owned(), module));
    }

    fn state(&mut self, _: &'a ModuleState) {}
}
