//! Spans of `tracing` as scopes of the profiler.

use std::cell::RefCell;

use overdrive_ffi::profiler::{ScopeGuard, record_function};
use tracing::Subscriber;
use tracing::span::Id;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

thread_local! {
    /// The spans that this thread is in, with their scopes.
    static ENTERED: RefCell<Vec<(Id, ScopeGuard)>> = const { RefCell::new(Vec::new()) };
}

/// Shows the spans of a program, and of these crates, in the profiler's traces.
///
/// Each thread has its own track with the thread's name. Spans that overlap without nesting are split into pieces that
/// nest. A span that is filtered out, or entered while no profiler records, costs next to nothing.
///
/// ```
/// use overdrive_profile::SpanLayer;
/// use tracing_subscriber::layer::SubscriberExt as _;
///
/// let subscriber = tracing_subscriber::registry().with(SpanLayer::new());
/// tracing::subscriber::with_default(subscriber, || {
///     let _span = tracing::info_span!("validation").entered();
///     // .. operators
/// });
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct SpanLayer;

impl SpanLayer {
    /// The layer.
    pub fn new() -> Self {
        Self
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanLayer {
    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let scope = record_function(span.name());
        if scope.is_open() {
            // This fails only while the thread ends, and then the scope ends too.
            let _ = ENTERED.try_with(|entered| entered.borrow_mut().push((id.clone(), scope)));
        }
    }

    fn on_exit(&self, id: &Id, _: Context<'_, S>) {
        let _ = ENTERED.try_with(|entered| {
            let mut entered = entered.borrow_mut();
            if let Some(place) = entered.iter().rposition(|(of, _)| of == id) {
                drop(entered.remove(place));
            }
        });
    }
}
