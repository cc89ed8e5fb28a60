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
    let lines: Vec<String> =
        modules.iter().map(|(name, module)| format!("  ({name}): {}\n", repr(*module).replace('\n', "\n  "))).collect();
    let name = text.split('(').next().unwrap_or_default();
    format!("{name}(\n{})", lines.concat())
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
