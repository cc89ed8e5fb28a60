//! What the threads of this process are called.
//!
//! kineto may name a thread twice: as it is called, and as that thread is called that ends the profile. Which of the two
//! comes last in a trace is up to chance.

use std::collections::BTreeMap;
use std::fs::{DirEntry, read_dir, read_to_string};

/// The names that threads have given themselves, at one time.
#[derive(Debug, Default)]
pub(crate) struct ThreadNames {
    /// In nanoseconds since the Unix epoch.
    pub at_ns: i64,
    /// By the system's number; without those that are called as the program is.
    pub names: BTreeMap<i64, String>,
}

impl ThreadNames {
    /// Those of the threads that are there now, at the end of what was recorded. Empty where the system does not tell.
    pub fn read(at_ns: i64) -> Self {
        let name = |task: DirEntry| {
            let number = task.file_name().to_str()?.parse::<i64>().ok()?;
            // It may have ended just now.
            Some((number, read_to_string(task.path().join("comm")).ok()?.trim_end().to_owned()))
        };
        let tasks = read_dir("/proc/self/task").into_iter().flatten().flatten();
        let mut names: BTreeMap<i64, String> = tasks.filter_map(name).collect();
        let program = names.get(&i64::from(std::process::id())).cloned();
        names.retain(|_, name| Some(&*name) != program.as_ref());
        Self { at_ns, names }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread::Builder;

    use super::*;

    #[test]
    fn threads_that_are_there_are_known_by_their_names() {
        let (ready, is_ready) = channel();
        let (end, told) = channel::<()>();
        let thread = Builder::new().name("pt_of_this_test".to_owned());
        let thread = thread.spawn(move || {
            ready.send(()).unwrap();
            let _ = told.recv();
        });
        is_ready.recv().unwrap();
        let count = || ThreadNames::read(5).names.values().filter(|name| *name == "pt_of_this_test").count();
        assert_eq!(count(), 1);
        drop(end);
        thread.unwrap().join().unwrap();
        assert_eq!(count(), 0);
    }
}
