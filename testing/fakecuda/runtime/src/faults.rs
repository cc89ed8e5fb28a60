//! Planted failures: of a call, of a piece of work, of a device.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::entry::{FAULTS, LEFT_OUT, is_watched, watch};
use crate::environment::{settings, tell, text};
use crate::error::CudaError;

/// When a piece of work fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The call that issues it returns the error, and it does not run.
    Issued,
    /// Its call succeeds. The host learns of it when it next waits.
    Run,
}

/// A failure of the nth call or piece of work of a name.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    what: String,
    /// How many more it takes; the one that makes it 0 fails.
    left: u64,
    code: i32,
    moment: Moment,
}

/// What is to fail, and what has failed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Faults {
    plans: Vec<Plan>,
    /// The error that all calls return from now on.
    sticky: Option<CudaError>,
    /// Work has failed with it, and the host has not been told.
    happened: Option<CudaError>,
    /// The lost devices, and what their calls return.
    lost: BTreeMap<usize, CudaError>,
    /// The functions that do nothing, where their first argument is 0, or is not, or always; and how often each was
    /// called so.
    left_out: BTreeMap<String, (Option<bool>, u64)>,
}

/// What only reads what the host knows: it works after a sticky error. For the others the documentation allows errors
/// of earlier work.
const HOST_ONLY: [&str; 7] = [
    "cudaGetDevice",
    "cudaGetDeviceCount",
    "cudaDriverGetVersion",
    "cudaRuntimeGetVersion",
    "cudaGetDeviceProperties",
    "cudaDeviceGetAttribute",
    "cudaThreadExchangeStreamCaptureMode",
];

impl Faults {
    /// From the environment: failures apart by `;`, each `NAME:NTH:CODE`, `later NAME:NTH:CODE` or `lost:DEVICE`. The
    /// name may hold colons. Returns what could not be read, too.
    fn read(text: &str) -> (Self, Vec<&str>) {
        let (mut faults, mut unread) = (Self::default(), Vec::new());
        for item in text.split(';').map(str::trim).filter(|item| !item.is_empty()) {
            if faults.read_one(item).is_none() {
                unread.push(item);
            }
        }
        (faults, unread)
    }

    fn read_one(&mut self, item: &str) -> Option<()> {
        if let Some(device) = item.strip_prefix("lost:") {
            self.lose(device.parse().ok()?, CudaError::DEVICES_UNAVAILABLE);
            return Some(());
        }
        let (rest, code) = item.rsplit_once(':')?;
        let (what, nth) = rest.rsplit_once(':')?;
        let (nth, code) = (nth.parse().ok()?, code.parse().ok()?);
        match what.strip_prefix("later ") {
            Some(what) => self.plan(what, nth, code, Moment::Run),
            None => self.plan(what, nth, code, Moment::Issued),
        }
        Some(())
    }

    /// The nth of this name from now fails, counted from 1.
    pub fn plan(&mut self, what: &str, nth: u64, code: i32, moment: Moment) {
        self.plans.push(Plan { what: what.to_owned(), left: nth.max(1), code, moment });
    }

    /// From now on a device is not there any more.
    pub fn lose(&mut self, device: usize, error: CudaError) {
        self.lost.insert(device, error);
    }

    /// From now on a C function does nothing and succeeds: where its first argument is 0, or is not, or always.
    pub fn leave_out(&mut self, what: &str, of_zero: Option<bool>) {
        self.left_out.insert(what.to_owned(), (of_zero, 0));
    }

    /// Whether a call with this first argument is left out.
    fn leaves_out(&mut self, what: &str, argument: usize) -> bool {
        let found = self.left_out.get_mut(what);
        let found = found.filter(|(of_zero, _)| of_zero.is_none_or(|of_zero| of_zero == (argument == 0)));
        found.map(|(_, times)| *times += 1).is_some()
    }

    /// What can never fail, by its name, and why.
    fn impossible(&self) -> impl Iterator<Item = (String, String)> {
        let devices = settings().devices;
        let lost = self.lost.keys().filter(move |device| **device >= devices);
        let lost = lost.map(move |device| (format!("lost:{device}"), format!("is none of {devices} devices")));
        let names = self.plans.iter().map(|plan| &plan.what).chain(self.left_out.keys());
        names.filter(|name| is_no_function(name)).map(|name| (name.clone(), "is no function".to_owned())).chain(lost)
    }

    /// What is planted and was not met, and what never can be.
    fn planted(&self) -> Vec<String> {
        let plans =
            self.plans.iter().map(|plan| format!("{:?} has {} to go until {}", plan.what, plan.left, plan.code));
        let left_out = self.left_out.iter().filter(|(_, (_, times))| *times == 0);
        let left_out = left_out.map(|(what, _)| format!("{what:?} is left out, and nothing calls it"));
        plans.chain(left_out).chain(self.impossible().map(|(what, why)| format!("{what:?} {why}"))).collect()
    }

    /// The code of the first plan that is due.
    fn due(&mut self, is_meant: impl Fn(&Plan) -> bool) -> Option<(Moment, i32)> {
        self.plans.iter_mut().filter(|plan| is_meant(plan)).for_each(|plan| plan.left -= 1);
        let at = self.plans.iter().position(|plan| plan.left == 0)?;
        let plan = self.plans.remove(at);
        // Others that are due with it fail the next one.
        self.plans.iter_mut().for_each(|plan| plan.left = plan.left.max(1));
        Some((plan.moment, plan.code))
    }

    /// The status that a call on this device returns; 0 if it succeeds.
    fn call(&mut self, name: &str, device: usize) -> i32 {
        let name = name.trim_start_matches('_');
        if let Some((_, code)) = self.due(|plan| plan.moment == Moment::Issued && plan.what == name) {
            if name.starts_with("cuda") {
                self.tell(CudaError(code));
            }
            return code;
        }
        // Only with `cudaSetDevice` does a thread leave a lost device.
        let lost = self.lost.get(&device).filter(|_| name != "cudaSetDevice");
        let Some(&error) = self.sticky.as_ref().or(lost) else { return 0 };
        status(name, error)
    }

    /// The failure that a piece of work meets.
    fn work(&mut self, what: &str) -> Option<(Moment, CudaError)> {
        let due = self.due(|plan| what.contains(plan.what.as_str()));
        due.map(|(moment, code)| (moment, CudaError(code)))
    }

    /// The host learns of an error.
    fn tell(&mut self, error: CudaError) {
        if error.is_sticky() {
            self.sticky.get_or_insert(error);
        }
    }

    /// What the host learns when it waits.
    fn told(&mut self) -> Result<(), CudaError> {
        let Some(error) = self.happened.take() else { return self.sticky.map_or(Ok(()), Err) };
        self.tell(error);
        Err(error)
    }
}

/// Whether a name can be that of a C function alone, and none has it. Names of kernels do not begin so.
fn is_no_function(name: &str) -> bool {
    let begins = |beginning: &str| {
        let rest = name.strip_prefix(beginning);
        rest.is_some_and(|rest| rest.starts_with(|it: char| it.is_ascii_uppercase()))
    };
    // SAFETY: the name is a text that ends with a zero byte.
    let is_there = |name: &CStr| !unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.is_null();
    // Where the stand-ins' own names are not to be seen, nothing is known of others.
    ["cuda", "nccl", "nvml"].iter().any(|it| begins(it))
        && is_there(c"fakecuda_planted")
        && CString::new(name).is_ok_and(|name| !is_there(&name))
}

/// What a library's function returns when CUDA itself has failed: its own code, as its header has them. The driver's
/// functions that only look something up succeed.
fn status(name: &str, error: CudaError) -> i32 {
    const CUBLAS_STATUS_EXECUTION_FAILED: i32 = 13;
    const NCCL_UNHANDLED_CUDA_ERROR: i32 = 1;
    let gives_up = ["Destroy", "Abort", "Finalize", "AsyncError", "GetVersion"].iter().any(|word| name.contains(word));
    let looks_up = ["cuInit", "cuDevice", "cuCtx", "cuGet"].iter().any(|begin| name.starts_with(begin));
    match name {
        _ if looks_up => 0,
        _ if HOST_ONLY.contains(&name) || name.starts_with("nvml") || name.starts_with("cudnn") => 0,
        _ if name.starts_with("cublas") && !gives_up => CUBLAS_STATUS_EXECUTION_FAILED,
        _ if name.starts_with("nccl") && !gives_up => NCCL_UNHANDLED_CUDA_ERROR,
        _ if name.starts_with("cublas") || name.starts_with("nccl") => 0,
        _ => error.0,
    }
}

static ALL: LazyLock<Mutex<Faults>> = LazyLock::new(|| {
    const NAME: &str = "FAKECUDA_FAIL";
    let text = text(NAME);
    let (faults, unread) = Faults::read(&text);
    unread.iter().for_each(|item| tell(NAME, item, "is not NAME:NTH:CODE, later NAME:NTH:CODE or lost:DEVICE"));
    faults.impossible().for_each(|(what, why)| tell(NAME, &what, &why));
    Mutex::new(faults)
});

fn all() -> MutexGuard<'static, Faults> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the environment plants.
pub fn read_environment() {
    drop(all());
}

/// The failures that were planted and not met yet, in words.
pub fn planted() -> Vec<String> {
    all().planted()
}

/// The status that a call on this device returns, [`LEFT_OUT`] if it does nothing; 0 if it is made.
pub fn of_call(name: &str, argument: usize, device: usize) -> i32 {
    let mut all = all();
    if *all == Faults::default() {
        watch(FAULTS, false);
        return 0;
    }
    if all.leaves_out(name, argument) { LEFT_OUT } else { all.call(name, device) }
}

/// The failure that a piece of work meets.
pub fn of_work(what: &str) -> Option<(Moment, CudaError)> {
    is_watched(FAULTS).then(|| all().work(what)).flatten()
}

/// Work has failed.
pub fn happen(error: CudaError) {
    change(|faults| {
        faults.happened.get_or_insert(error);
    });
}

/// What the host learns of failed work when it waits.
pub fn told() -> Result<(), CudaError> {
    if is_watched(FAULTS) { all().told() } else { Ok(()) }
}

/// The error of a device that is lost.
pub fn lost(device: usize) -> Result<(), CudaError> {
    if !is_watched(FAULTS) {
        return Ok(());
    }
    all().lost.get(&device).map_or(Ok(()), |error| Err(*error))
}

/// Plants failures.
pub fn change(change: impl FnOnce(&mut Faults)) {
    change(&mut all());
    watch(FAULTS, true);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::nccl_tests::alone;

    fn read(text: &str) -> Faults {
        let (faults, unread) = Faults::read(text);
        assert!(unread.is_empty(), "{unread:?}");
        faults
    }

    #[test]
    fn the_nth_call_fails_once_and_others_are_not_counted() {
        let mut faults = read("cudaMalloc:3:2");
        let calls = ["cudaMalloc", "cudaFree", "cudaMalloc", "cudaMallocAsync", "cudaMalloc", "cudaMalloc"];
        assert_eq!(calls.map(|name| faults.call(name, 0)), [0, 0, 0, 0, 2, 0]);
    }

    #[test]
    fn a_sticky_error_stays_and_libraries_return_their_own_codes() {
        let mut faults = read("cudaLaunchKernel:1:700; cudaLaunchKernel:1:9");
        assert_eq!(faults.call("__cudaLaunchKernel", 0), 700);
        let calls =
            ["cudaLaunchKernel", "cudaStreamSynchronize", "cudaGetLastError", "cudaGetDevice", "cublasSgemm_v2"];
        assert_eq!(calls.map(|name| faults.call(name, 1)), [9, 700, 700, 0, 13], "a plan comes first");
        let calls = ["ncclAllReduce", "ncclCommAbort", "cublasDestroy_v2", "nvmlInit_v2", "cudaMalloc"];
        assert_eq!(calls.map(|name| faults.call(name, 1)), [1, 0, 0, 0, 700]);
        let mut other = read("cudaMalloc:1:2");
        assert_eq!([other.call("cudaMalloc", 0), other.call("cudaFree", 0)], [2, 0], "2 does not stay");
    }

    #[test]
    fn work_fails_by_a_part_of_its_name_at_once_or_when_the_host_waits() {
        let mut faults = read("later adam:2:719;gemm:1:9");
        assert_eq!(faults.work("cublasSgemm_v2"), Some((Moment::Issued, CudaError(9))));
        assert_eq!(faults.work("fused_adam_kernel"), None);
        assert_eq!(faults.work("fused_adam_kernel"), Some((Moment::Run, CudaError(719))));
        assert_eq!((faults.told(), faults.call("cudaFree", 0)), (Ok(()), 0));
        faults.happened = Some(CudaError(719));
        assert_eq!(faults.call("cudaLaunchKernel", 0), 0, "nobody has waited");
        assert_eq!((faults.told(), faults.told()), (Err(CudaError(719)), Err(CudaError(719))));
        assert_eq!(faults.call("cudaFree", 0), 719);
    }

    #[test]
    fn work_that_fails_late_is_told_after_its_plan_is_gone() {
        // Others in this process wait, and would be told.
        alone("faults::tests::work_that_fails_late_is_told_after_its_plan_is_gone", || {
            assert_eq!(told(), Ok(()));
            change(|faults| faults.plan("late", 1, 9, Moment::Run));
            assert_eq!(of_work("late"), Some((Moment::Run, CudaError(9))));
            assert_eq!((of_call("cudaMalloc", 0, 0), is_watched(FAULTS)), (0, false), "nothing is planned");
            happen(CudaError(9));
            assert_eq!((told(), told()), (Err(CudaError(9)), Ok(())), "9 does not stay");
        });
    }

    #[test]
    fn a_lost_device_fails_alone() {
        let mut faults = read("lost:1");
        assert_eq!([0, 1].map(|device| faults.call("cudaMalloc", device)), [0, 46]);
        assert_eq!(faults.call("cudaSetDevice", 1), 0, "to another one");
    }

    #[test]
    fn what_was_not_met_and_what_never_can_be_is_told() {
        let mut faults = read("cudaMalloc:2:2;lost:0;lost:99");
        let devices = settings().devices;
        let lost = format!("\"lost:99\" is none of {devices} devices");
        faults.call("cudaMalloc", 99);
        assert_eq!(faults.planted(), ["\"cudaMalloc\" has 1 to go until 2".to_owned(), lost.clone()]);
        faults.call("cudaMalloc", 99);
        assert_eq!(faults.planted(), [lost]);
    }

    #[test]
    fn what_is_left_out_is_left_out_each_time_and_told_if_nothing_calls_it() {
        let mut faults = Faults::default();
        faults.leave_out("cudaStreamWaitEvent", Some(false));
        faults.leave_out("cudaEventRecord", None);
        assert_eq!([0, 256, 256].map(|stream| faults.leaves_out("cudaStreamWaitEvent", stream)), [false, true, true]);
        assert_eq!(faults.planted(), ["\"cudaEventRecord\" is left out, and nothing calls it"]);
        assert_eq!([0, 256].map(|event| faults.leaves_out("cudaEventRecord", event)), [true; 2]);
        assert!(!faults.leaves_out("cudaMalloc", 0) && faults.planted().is_empty());
        faults.leave_out("cudaStreamWaitEvent", Some(true));
        assert_eq!([0, 256].map(|stream| faults.leaves_out("cudaStreamWaitEvent", stream)), [true, false]);
    }

    #[test]
    fn names_may_hold_colons_and_what_is_no_plan_is_told() {
        assert_eq!(read("at::native::fill:2:9").plans[0].what, "at::native::fill");
        let (faults, unread) = Faults::read("cudaMalloc:x:2;; lost:one;cudaFree");
        assert_eq!((faults, unread), (Faults::default(), vec!["cudaMalloc:x:2", "lost:one", "cudaFree"]));
    }
}
