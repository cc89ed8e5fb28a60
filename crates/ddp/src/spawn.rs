//! Starts ranks on this machine from within the program.

use std::fmt::Debug;
use std::process::exit;

use overdrive_launch::{Launch, LaunchError};

/// Runs `work` on `nproc` ranks of this machine and waits for them. A rank that fails ends the others, and is reported.
///
/// The program is started again for each rank, with the same arguments, and runs up to this call, where the rank does
/// the work and exits. So call it early in `main`, before anything that should happen only once. Under a launcher
/// (torchrun, overdrive-run, srun, mpirun) this process is already a rank, and the launcher's number of ranks is used.
///
/// Ranks meet by `init_process_group(backend, InitMethod::Auto)`. Each line of their output is prefixed with `[rank0]:
/// ` and so on. No rank outlives this process, however it ends.
///
/// ```no_run
/// use overdrive_ddp::{Backend, DdpError, InitMethod, ReduceOp, init_process_group, spawn};
/// use tch::Tensor;
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     spawn(2, || {
///         let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
///         let mut sum = Tensor::from(group.rank() as i64 + 1);
///         group.all_reduce(&mut sum, ReduceOp::Sum)?;
///         assert_eq!(sum.int64_value(&[]), 3);
///         Ok::<(), DdpError>(())
///     })?;
///     Ok(())
/// }
/// ```
///
/// # Errors
/// [`LaunchError`]: the first rank that failed, with its exit code or signal and the end of its output, or why ranks could
/// not be started. A rank whose work returns an error prints it and ends with code 1.
///
/// # Source
/// `torch.multiprocessing.spawn`
pub fn spawn<E: Debug>(nproc: usize, work: impl FnOnce() -> Result<(), E>) -> Result<(), LaunchError> {
    overdrive_launch::helper();
    if is_rank() {
        do_work(work)
    }
    Launch::current_program().nproc(nproc).forward_signals().run()
}

fn is_rank() -> bool {
    let is_set = |variable| std::env::var_os(variable).is_some_and(|value| !value.is_empty());
    ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"].into_iter().any(is_set)
}

fn do_work<E: Debug>(work: impl FnOnce() -> Result<(), E>) -> ! {
    if let Err(error) = work() {
        eprintln!("Error: {error:?}");
        exit(1)
    }
    exit(0)
}
