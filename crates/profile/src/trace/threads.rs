//! The names of this process's threads.
//!
//! kineto may name a thread twice: by its own name, and by that of the thread that ends the profile. Which one comes
//! last in a trace is random.

use std::collections::BTreeMap;
use std::fs::{DirEntry, read_dir, read_to_string};

/// The threads' names at one time.
#[derive(Debug, Default)]
pub(crate) struct ThreadNames {
    /// In nanoseconds since the Unix epoch.
    pub at_ns: i64,
    /// By the system's thread ID, without the threads that have the program's name.
    pub names: BTreeMap<i64, String>,
}

impl ThreadNames {
    /// The names of the threads that run now, at the end of a recording. Empty if the system does not provide them.
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
    fn running_threads_are_listed_by_their_names() {
        let (ready, is_ready) = channel();
        let (end, ended) = channel::<()>();
        let thread = Builder::new().name("pt_of_this_test".to_owned());
        let thread = thread.spawn(move || {
            ready.send(()).unwrap();
            let _ = ended.recv();
        });
        is_ready.recv().unwrap();
        let count = || ThreadNames::read(5).names.values().filter(|name| *name == "pt_of_this_test").count();
        assert_eq!(count(), 1);
        drop(end);
        thread.unwrap().join().unwrap();
        assert_eq!(count(), 0);
    }
}
