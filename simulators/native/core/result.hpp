// What an operation of the simulated device can end in. Each front end translates it into its vendor's codes.
#pragma once

namespace hardpoint::simulators {

enum class Result {
  Ok,
  InvalidValue,
  InvalidDirection,  // of a copy
  NullArgument,      // a null pointer or unknown flags: seen before the device is asked
  OutOfMemory,
  NotInitialized,
  AlreadyInitialized,
  NoDevice,
  InvalidDevice,
  InvalidContext,
  ContextDestroyed,
  InvalidHandle,
  IllegalAddress,
  NotSupported,
  NotPermitted,
  NotReady,
  HostAlreadyRegistered,
  HostNotRegistered,
  IllegalState,
  CaptureUnsupported,  // by a stream that is being captured
  CaptureInvalidated,
  CaptureWrongThread,
};

}  // namespace hardpoint::simulators
