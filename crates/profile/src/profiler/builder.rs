//! What a profiler records, and when.

use overdrive_ffi::profiler::Options;

use super::handler::TraceHandler;
use super::machine::{Profiler, Setup, check_metadata};
use super::schedule::{ProfilerAction, Schedule};
use crate::ProfileError;
use crate::events::Recording;

/// A kind of activity to record.
///
/// # Source
/// `torch.profiler.ProfilerActivity`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ProfilerActivity")]
pub enum Activity {
    /// Operators and scopes on the host.
    Cpu,
    /// Kernels, copies and calls of the CUDA runtime.
    Cuda,
}

/// Options of a [`Profiler`]; the defaults are PyTorch's.
#[must_use = "the profiler is made by `build`"]
pub struct ProfilerBuilder {
    activities: Option<Vec<Activity>>,
    options: Options,
    acc_events: bool,
    schedule: Option<Box<dyn Fn(u64) -> ProfilerAction>>,
    handler: Option<Box<dyn TraceHandler>>,
    metadata: Vec<(String, String)>,
}

impl ProfilerBuilder {
    pub(super) fn new() -> Self {
        Self {
            activities: None,
            options: Options::default(),
            acc_events: false,
            schedule: None,
            handler: None,
            metadata: Vec::new(),
        }
    }

    /// What is recorded [default: the CPU, and CUDA where there is a GPU].
    pub fn activities(mut self, activities: &[Activity]) -> Self {
        self.activities = Some(activities.to_vec());
        self
    }

    /// Whether the shapes and types of the operators' inputs are recorded [default: no].
    pub fn record_shapes(mut self, record: bool) -> Self {
        self.options.record_shapes = record;
        self
    }

    /// Whether allocations and frees of memory are recorded [default: no].
    pub fn profile_memory(mut self, record: bool) -> Self {
        self.options.profile_memory = record;
        self
    }

    /// Whether the floating point operations of matrix products and convolutions are computed [default: no].
    pub fn with_flops(mut self, record: bool) -> Self {
        self.options.with_flops = record;
        self
    }

    /// Whether the names of the operators' overloads are recorded [default: no].
    ///
    /// # Source
    /// `capture_overload_names` of PyTorch's `_ExperimentalConfig`
    pub fn overload_names(mut self, record: bool) -> Self {
        self.options.overload_names = record;
        self
    }

    /// Whether each profile also has the events of all earlier profiles [default: no]. They stay in memory.
    pub fn acc_events(mut self, accumulate: bool) -> Self {
        self.acc_events = accumulate;
        self
    }

    /// Which steps are recorded [default: all, in one profile]. Steps become scopes named `ProfilerStep#N`.
    pub fn schedule(self, schedule: Schedule) -> Self {
        self.schedule_fn(move |step| schedule.action(step))
    }

    /// The action in each step, as a function of the step number; steps count from 0.
    pub fn schedule_fn(mut self, action: impl Fn(u64) -> ProfilerAction + 'static) -> Self {
        self.schedule = Some(Box::new(action));
        self
    }

    /// What happens to each profile: a closure, or a
    /// [`tensorboard_trace_handler`](crate::tensorboard_trace_handler).
    pub fn on_trace_ready(mut self, handler: impl TraceHandler + 'static) -> Self {
        self.handler = Some(Box::new(handler));
        self
    }

    /// Adds a top-level key to each trace; `json` is its value, as JSON.
    ///
    /// # Source
    /// `torch.profiler.profile.preset_metadata_json`
    #[doc(alias = "preset_metadata_json")]
    pub fn metadata_json(mut self, key: impl Into<String>, json: impl Into<String>) -> Self {
        self.metadata.push((key.into(), json.into()));
        self
    }

    /// Builds the profiler, which is not on yet.
    ///
    /// # Errors
    /// When there is nothing to record: CUDA alone without a GPU, or no activity at all. When
    /// [`Profiler::add_metadata_json`] would refuse a key or a value of the metadata.
    pub fn build(mut self) -> Result<Profiler, ProfileError> {
        let wanted = self.activities.unwrap_or_else(|| vec![Activity::Cpu, Activity::Cuda]);
        let has_cuda = tch::Cuda::is_available();
        self.options.cpu = wanted.contains(&Activity::Cpu);
        self.options.cuda = wanted.contains(&Activity::Cuda) && has_cuda;
        if wanted.is_empty() {
            return Err(ProfileError::NothingToRecord("choose `Activity::Cpu`, `Activity::Cuda` or both"));
        }
        if !self.options.cpu && !self.options.cuda {
            return Err(ProfileError::NothingToRecord("only `Activity::Cuda` was chosen, and there is no CUDA device"));
        }
        self.metadata.iter().try_for_each(|(key, json)| check_metadata(key, json))?;
        for (key, wanted) in [
            ("profile_memory", self.options.profile_memory),
            ("record_shapes", self.options.record_shapes),
            ("with_flops", self.options.with_flops),
        ] {
            if wanted {
                self.metadata.push((key.to_owned(), "1".to_owned()));
            }
        }
        let recording = Recording {
            cuda: self.options.cuda,
            profile_memory: self.options.profile_memory,
            with_flops: self.options.with_flops,
        };
        Ok(Profiler::new(Setup {
            options: self.options,
            recording,
            acc_events: self.acc_events,
            schedule: self.schedule,
            handler: self.handler,
            metadata: self.metadata,
        }))
    }

    /// Builds and starts the profiler.
    ///
    /// # Errors
    /// As for [`ProfilerBuilder::build`] and [`Profiler::start`].
    pub fn start(self) -> Result<Profiler, ProfileError> {
        let mut profiler = self.build()?;
        profiler.start()?;
        Ok(profiler)
    }
}

impl std::fmt::Debug for ProfilerBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProfilerBuilder")
            .field("activities", &self.activities)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
