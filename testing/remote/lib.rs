//! An S3 server on the loopback, for the tests and `versus loader`.

pub mod server;
