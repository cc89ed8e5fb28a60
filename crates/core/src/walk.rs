//! Walks through the parts of a module.

use std::collections::HashSet;

use tch::Tensor;

use crate::module::{Module, ModuleId, ModuleState, Visitor};

/// A part found by [`walk`].
pub(crate) enum Item<'a, 'b> {
    Parameter { name: &'b str, tensor: &'b Tensor },
    Buffer { name: &'b str, tensor: &'b Tensor, persistent: bool },
    Module { name: &'b str, module: &'a dyn Module },
    State { state: &'a ModuleState },
}

/// Shows all parts of a module with their dotted names: first its own parameters and buffers, then its modules, as
/// PyTorch does, each in the order in which they were declared.
pub(crate) fn walk<'a, M: Module>(module: &'a M, each: &mut dyn FnMut(Item<'a, '_>)) {
    let mut walk = Walk { path: String::new(), around: module.id().into_iter().collect(), in_modules: false, each };
    module.visit(&mut walk);
    walk.in_modules = true;
    module.visit(&mut walk);
}

struct Walk<'a, 'w> {
    path: String,
    /// The current module, and the modules that contain it.
    around: Vec<ModuleId>,
    /// Each module is visited twice: first for its own parameters, buffers and state, then, with this set, for its
    /// modules.
    in_modules: bool,
    each: &'w mut dyn FnMut(Item<'a, '_>),
}

impl Walk<'_, '_> {
    /// Appends a name to the path while `work` runs.
    fn within(&mut self, name: &str, work: impl FnOnce(&mut Self)) {
        let length = self.path.len();
        if length > 0 {
            self.path.push('.');
        }
        self.path.push_str(name);
        work(self);
        self.path.truncate(length);
    }
}

impl<'a> Visitor<'a> for Walk<'a, '_> {
    fn parameter(&mut self, name: &str, tensor: &Tensor) {
        if !self.in_modules {
            self.within(name, |walk| (walk.each)(Item::Parameter { name: &walk.path, tensor }));
        }
    }

    fn buffer(&mut self, name: &str, tensor: &Tensor, persistent: bool) {
        if !self.in_modules {
            self.within(name, |walk| (walk.each)(Item::Buffer { name: &walk.path, tensor, persistent }));
        }
    }

    fn module(&mut self, name: &str, module: &'a dyn Module) {
        if !self.in_modules || module.id().is_some_and(|id| self.around.contains(&id)) {
            return;
        }
        let depth = self.around.len();
        self.around.extend(module.id());
        self.within(name, |walk| {
            (walk.each)(Item::Module { name: &walk.path, module });
            walk.in_modules = false;
            module.visit(walk);
            walk.in_modules = true;
            module.visit(walk);
        });
        self.around.truncate(depth);
    }

    fn state(&mut self, state: &'a ModuleState) {
        if self.in_modules {
            return;
        }
        state.found_at(&self.path);
        (self.each)(Item::State { state });
    }
}

/// Calls a function for each module in this one, inner ones first, then for this one. `around` are the module and those
/// that contain it.
pub(crate) fn apply(module: &dyn Module, around: &mut Vec<ModuleId>, each: &mut dyn FnMut(&dyn Module)) {
    struct Children<'w> {
        around: &'w mut Vec<ModuleId>,
        /// The modules that were visited, because the function is called once for a module that its parent owns twice.
        shown: HashSet<ModuleId>,
        each: &'w mut dyn FnMut(&dyn Module),
    }
    impl<'a> Visitor<'a> for Children<'_> {
        fn parameter(&mut self, _: &str, _: &Tensor) {}
        fn buffer(&mut self, _: &str, _: &Tensor, _: bool) {}
        fn module(&mut self, _: &str, module: &'a dyn Module) {
            if module.id().is_some_and(|id| self.around.contains(&id) || !self.shown.insert(id)) {
                return;
            }
            let depth = self.around.len();
            self.around.extend(module.id());
            apply(module, self.around, self.each);
            self.around.truncate(depth);
        }
        fn state(&mut self, _: &'a ModuleState) {}
    }
    module.visit(&mut Children { around, shown: HashSet::new(), each });
    each(module);
}
