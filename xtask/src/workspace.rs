//! The workspace's folder, and child processes with the environment that plain `cargo` has.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

/// The workspace's folder, from which every command runs.
pub struct Workspace {
    root: PathBuf,
}

impl Workspace {
    /// The workspace that holds this xtask.
    pub fn find() -> Result<Self> {
        let manifest_dir = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&manifest_dir).parent().context("xtask has no parent folder: run it as `cargo xtask`")?;
        Ok(Self { root: root.to_path_buf() })
    }

    /// `path` inside the workspace.
    pub fn join(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The value that `.cargo/config.toml` gives LIBTORCH, unless the user has set it.
    pub fn default_libtorch(&self) -> PathBuf {
        self.join(".libtorch/torch")
    }

    /// The LIBTORCH that the user has set. Cargo sets it too before it runs xtask, from `[env]`: that value does not
    /// count.
    pub fn user_libtorch(&self) -> Option<PathBuf> {
        let value = PathBuf::from(env::var_os("LIBTORCH").filter(|value| !value.is_empty())?);
        (value != self.default_libtorch()).then_some(value)
    }

    /// A child process in the workspace's root, without the variables that cargo and its runner added for xtask. With
    /// another LIBTORCH than plain `cargo build` has, a nested cargo would rebuild torch-sys; with the loader path of
    /// another libtorch, python3 would load the wrong one.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        let libtorch = self.user_libtorch().unwrap_or_else(|| {
            command.env_remove("LIBTORCH");
            self.default_libtorch()
        });
        if let Some(path) = env::var_os("LD_LIBRARY_PATH") {
            match without_entry(&path, &libtorch.join("lib")) {
                Some(rest) => command.env("LD_LIBRARY_PATH", rest),
                None => command.env_remove("LD_LIBRARY_PATH"),
            };
        }
        command
    }

    /// The cargo that runs xtask, in the workspace's root.
    pub fn cargo<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(&self, args: I) -> Command {
        let mut command = self.command(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(args);
        command
    }

    /// The same in the user's current folder, for programs that take paths from the user.
    pub fn cargo_here<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(&self, args: I) -> Command {
        let mut command = self.cargo(args);
        if let Ok(here) = env::current_dir() {
            command.current_dir(here);
        }
        command
    }
}

/// A path list without one entry; `None` when nothing is left.
fn without_entry(list: &OsStr, entry: &Path) -> Option<OsString> {
    let rest: Vec<_> = env::split_paths(list).filter(|path| path != entry).collect();
    env::join_paths(rest).ok().filter(|list| !list.is_empty())
}

/// The command as a user would type it, for messages.
pub fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words: Vec<_> = std::iter::once(program).chain(command.get_args()).map(OsStr::to_string_lossy).collect();
    words.join(" ")
}

/// Runs a command to its end, and shows its output.
pub fn status(command: &mut Command) -> Result<ExitStatus> {
    command.status().with_context(|| format!("cannot start `{}`", shown(command)))
}

/// Whether a command exists and succeeds; its output is discarded.
pub fn runs(command: &mut Command) -> bool {
    let silent = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    silent.status().is_ok_and(|status| status.success())
}

/// Runs a command that has to succeed.
pub fn succeed(command: &mut Command) -> Result<()> {
    let status = status(command)?;
    if !status.success() {
        bail!("`{}` failed ({status})", shown(command));
    }
    Ok(())
}

/// Runs a command that has to succeed and returns what it printed.
pub fn capture(command: &mut Command) -> Result<String> {
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start `{}`", shown(command)))?;
    if !output.status.success() {
        bail!("`{}` failed ({})", shown(command), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a command, shows its output and errors as they arrive, and passes each line to `see`.
pub fn tee(command: &mut Command, mut see: impl FnMut(&str)) -> Result<ExitStatus> {
    lines(command, |line| {
        println!("{line}");
        see(line);
    })
}

/// Runs a command to its end, and passes on each line of its output and its errors.
pub fn lines(command: &mut Command, mut see: impl FnMut(&str)) -> Result<ExitStatus> {
    let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    // One pipe for both keeps the order of the lines.
    command.stdout(writer.try_clone().context("cannot copy a pipe's end")?).stderr(writer);
    let mut child = command.spawn().with_context(|| format!("cannot start `{}`", shown(command)))?;
    // Replaces our copies of the pipe's writing end, which would keep the pipe open.
    command.stdout(Stdio::inherit()).stderr(Stdio::inherit());
    for line in BufReader::new(reader).split(b'\n') {
        let line = line.context("cannot read a child's output")?;
        see(&String::from_utf8_lossy(&line));
    }
    child.wait().with_context(|| format!("cannot wait for `{}`", shown(command)))
}

/// The child's exit code as ours: the child has already reported what went wrong.
pub fn exit_code(status: ExitStatus) -> ExitCode {
    match status.code() {
        Some(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        None => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runner_s_entry_is_removed_from_the_loader_path_and_the_user_s_stays() {
        let entry = Path::new("/w/.libtorch/torch/lib");
        assert_eq!(without_entry(OsStr::new("/w/.libtorch/torch/lib:/opt/lib"), entry), Some("/opt/lib".into()));
        assert_eq!(without_entry(OsStr::new("/w/.libtorch/torch/lib"), entry), None);
    }

    #[test]
    fn a_command_is_shown_without_the_program_s_folder() {
        let mut command = Command::new("/toolchain/bin/cargo");
        command.args(["test", "--workspace"]);
        assert_eq!(shown(&command), "cargo test --workspace");
    }
}
