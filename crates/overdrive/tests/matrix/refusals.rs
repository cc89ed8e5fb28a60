//! The combinations that must be refused, with the expected messages. Any other refusal is a failure, and so is a cell
//! listed here that runs.

use crate::choices::{Accum, Cell, Clip, Opt, Ranks, Resume, Scaling, Sched};

/// The reasons for which a cell must be refused; if empty, it has to run.
pub fn expected(cell: &Cell) -> Vec<&'static str> {
    let mut reasons = Vec::new();
    let mut refused = |applies: bool, reason| reasons.extend(applies.then_some(reason));
    let in_backward = cell.optimizer == Opt::InBackward;
    refused(
        in_backward && cell.scaler == Scaling::On,
        "GradScaler cannot be used with this optimizer: it steps during the backward pass",
    );
    refused(
        in_backward && cell.accumulator != Accum::Off && cell.ranks == Ranks::Alone,
        "Accumulator cannot be used with this optimizer: it steps at each backward pass",
    );
    refused(in_backward && cell.clipping != Clip::Off, "it is stepped in backward, before anything can be clipped");
    refused(
        cell.optimizer == Opt::OneBit && cell.scaler == Scaling::On,
        "GradScaler cannot be used with this optimizer: it averages over ranks in its steps",
    );
    refused(
        cell.optimizer == Opt::ScheduleFree && cell.schedule == Sched::OneCycle,
        "this optimizer has no momentum to cycle",
    );
    refused(
        cell.optimizer == Opt::Tch && cell.resume != Resume::Off,
        "this optimizer does not show its state (tch's does not)",
    );
    reasons
}
