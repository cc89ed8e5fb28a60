//! Whether the process of a rank is alive.

/// A process. Its ID can be given to another process once it is gone, but not its start: together they identify it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pub id: u32,
    /// The time of its start, in ticks since the machine was started.
    pub start: u64,
}

/// The states of a zombie, whose parent has not waited for it yet, and of a process that is being removed.
const GONE: [&str; 3] = ["Z", "X", "x"];

impl Process {
    pub fn own() -> Self {
        let id = std::process::id();
        Self { id, start: start_of(id).unwrap_or(0) }
    }

    /// Whether it is alive. A process that has executed another program is.
    pub fn is_alive(self) -> bool {
        start_of(self.id) == Some(self.start)
    }
}

/// The start of a process that has not ended. By proc(5), the state is the first field after the name, and the start
/// the 20th.
fn start_of(id: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    let fields: Vec<&str> = text.get(text.rfind(')')? + 1..)?.split_whitespace().collect();
    let [state, start] = [fields.first()?, fields.get(19)?];
    if GONE.contains(state) { None } else { start.parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_has_ended_is_gone_before_its_parent_asks_and_so_is_one_with_its_number() {
        let own = Process::own();
        assert!(own.start > 0 && own.is_alive());
        assert!(!Process { start: own.start + 1, ..own }.is_alive());
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let other = Process { id: child.id(), start: start_of(child.id()).unwrap() };
        assert!(other.is_alive());
        child.kill().unwrap();
        // The system needs a moment to end it; it stays a zombie until `wait`.
        while other.is_alive() {
            std::thread::yield_now();
        }
        assert!(std::fs::exists(format!("/proc/{}/stat", other.id)).unwrap(), "a zombie");
        child.wait().unwrap();
        assert!(!other.is_alive());
    }
}
