// libtorch's profiler: one session per process, what it recorded, and user-defined scopes. The rules of overdrive.h
// apply.
#pragma once

#include "overdrive.h"

extern "C" {

typedef struct {
  int32_t cpu, cuda;  // what is recorded
  int32_t record_shapes, profile_memory, with_flops, overload_names;
  const char* trace_id;  // for the head of the trace
} od_profiler_options;

// What a session recorded; may be used and freed on any thread. Events may be read while it is being saved.
typedef struct od_trace od_trace;
// An open scope; must be closed on the thread that opened it.
typedef struct od_scope od_scope;

// One event. Its indices refer to the strings and `inputs` of its od_events.
typedef struct {
  int64_t start_ns, end_ns;  // since the Unix epoch
  uint64_t correlation_id, linked_correlation_id;
  uint64_t start_thread, end_thread, forward_thread;  // libtorch's thread numbers
  int64_t sequence_number;
  uint64_t flops;
  int64_t bytes;              // of a "[memory]" event: allocated, or freed if negative
  int64_t resource;           // the system's thread id, or a stream's number
  uint64_t inputs;            // the index of its first input
  uint32_t n_inputs;          // 0 if shapes are not recorded
  uint32_t name, overload;    // indices of strings
  int32_t device_type, device_index;
  uint8_t activity, scope, is_async, is_hidden;
} od_event;

// All events of a trace in arrays. An input is two or more numbers in `inputs`: the string index of its type's name,
// the number of its dimensions, and each of them.
typedef struct {
  const od_event* events;
  size_t n_events;
  const int64_t* inputs;
  size_t n_inputs;
  const char* text;           // all strings, concatenated
  const uint64_t* text_ends;  // the end of each string in `text`
  size_t n_strings;
} od_events_view;
typedef struct od_events od_events;

// profiler.cpp
od_status od_profiler_prepare(const od_profiler_options* options, od_error* err) noexcept;
od_status od_profiler_enable(const od_profiler_options* options, od_error* err) noexcept;
// Call it on the thread that enabled the profiler.
od_status od_profiler_disable(od_trace** out, od_error* err) noexcept;
// Adds a key to the trace's head; `json` is a JSON value. Only after enabling.
od_status od_profiler_add_metadata(const char* key, const char* json, od_error* err) noexcept;
void od_trace_free(od_trace* trace) noexcept;
od_status od_trace_start_ns(const od_trace* trace, int64_t* out, od_error* err) noexcept;
// Works once per trace. Failures to write the file are not reported.
od_status od_trace_save(od_trace* trace, const char* path, od_error* err) noexcept;
od_status od_scope_enter(const char* name, size_t length, od_scope** out, od_error* err) noexcept;
od_status od_scope_exit(od_scope* scope, od_error* err) noexcept;
// libtorch's number of this thread, and the system's id.
void od_current_thread(uint64_t* number, int64_t* system) noexcept;

// profiler_events.cpp
od_status od_trace_events(const od_trace* trace, od_events** out, od_events_view* view, od_error* err) noexcept;
void od_events_free(od_events* events) noexcept;
}
